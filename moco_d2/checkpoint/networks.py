"""Networks that weights are checked in: detectron2's own, and those that the sources come from."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moco_d2.checkpoint.verify import (
    BASIC_DEPTHS,
    BOTTLENECK_DEPTHS,
    STAGES,
    build_resnet,
    import_timm,
    unfilled,
)

# Side of the images that ResNets are compared on: two pixels are left in the last stage.
IMAGE_SIZE = 64


class Detectron2Features(nn.Module):
    """detectron2's ResNet behind an input convention.

    Args:
        architecture: see :func:`build_resnet`.
        convention: see `convention.py`.
    """

    def __init__(self, architecture: Mapping, convention: Mapping):
        super().__init__()
        self.image_size = IMAGE_SIZE
        self.channels = len(convention["pixel_mean"])
        self.body = build_resnet(architecture, convention["stride_in_1x1"], self.channels)
        self._convention = convention

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """
        Args:
            images: uint8 (N, C, H, W), RGB where C = 3.

        Returns:
            features by stage.
        """
        if self._convention["format"] == "BGR" and self.channels == 3:
            images = images.flip(1)
        mean, std = (
            torch.tensor(self._convention[key], dtype=torch.float64).view(-1, 1, 1)
            for key in ("pixel_mean", "pixel_std")
        )
        return self.body(((images - mean) / std).to(next(self.body.parameters()).dtype))


class TorchvisionFeatures(nn.Module):
    """torchvision's own ResNet behind the input convention of those who trained it.

    Args:
        architecture: see :func:`moco_d2.checkpoint.verify.architecture_from`.
        stated: what a user says of the input convention, in place of what is known below.
        mean, std: on the 0-1 scale, as in the code of the source, in the order of `channels`.
        channels: "RGB" or "BGR".
        stride_in_1x1: move each bottleneck's stride to its first convolution.
    """

    def __init__(
        self,
        architecture: Mapping,
        stated: Mapping[str, Any],
        *,
        mean: tuple[float, ...] = (0.485, 0.456, 0.406),
        std: tuple[float, ...] = (0.229, 0.224, 0.225),
        channels: str = "RGB",
        stride_in_1x1: bool = False,
    ):
        super().__init__()
        self.image_size = IMAGE_SIZE
        depth = architecture["depth"]
        bottleneck = depth in BOTTLENECK_DEPTHS.values()
        table = BOTTLENECK_DEPTHS if bottleneck else BASIC_DEPTHS
        blocks = next(list(blocks) for blocks, known in table.items() if known == depth)
        self.body = unfilled(lambda: self._build(bottleneck, blocks, architecture))
        self.body.fc = nn.Identity()
        self._order = [2, 1, 0] if stated.get("format", channels) == "BGR" else [0, 1, 2]
        scales = (stated.get("pixel_mean"), mean), (stated.get("pixel_std"), std)
        self._mean, self._std = (
            torch.tensor([v / 255 for v in given] if given else own, dtype=torch.float64)
            for given, own in scales
        )
        if stated.get("stride_in_1x1", stride_in_1x1) and bottleneck:
            for stage in (self.body.layer2, self.body.layer3, self.body.layer4):
                stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)

    def _build(self, bottleneck: bool, blocks: list[int], architecture: Mapping) -> nn.Module:
        # Only this check needs torchvision's models, and importing them takes a while.
        from torchvision.models import resnet

        return resnet.ResNet(
            resnet.Bottleneck if bottleneck else resnet.BasicBlock,
            blocks,
            groups=architecture["num_groups"],
            width_per_group=architecture["width_per_group"],
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Like :meth:`Detectron2Features.forward`."""
        mean, std = self._mean.view(3, 1, 1), self._std.view(3, 1, 1)
        images = images.double()[:, self._order] / 255
        x = ((images - mean) / std).to(self.body.conv1.weight.dtype)
        x = self.body.maxpool(torch.relu(self.body.bn1(self.body.conv1(x))))
        features = {}
        for stage, layer in zip(STAGES, ("layer1", "layer2", "layer3", "layer4"), strict=True):
            x = features[stage] = getattr(self.body, layer)(x)
        return features


class TimmFeatures(TorchvisionFeatures):
    """timm's own ResNet, whose tensors have torchvision's names."""

    def _build(self, bottleneck: bool, blocks: list[int], architecture: Mapping) -> nn.Module:
        timm = import_timm()
        if timm is None:
            return super()._build(bottleneck, blocks, architecture)
        block = timm.models.resnet.Bottleneck if bottleneck else timm.models.resnet.BasicBlock
        return timm.models.resnet.ResNet(
            block,
            tuple(blocks),
            cardinality=architecture["num_groups"],
            base_width=architecture["width_per_group"],
        )
