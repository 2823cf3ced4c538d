"""FCNHead: the MoCo paper's head for semantic segmentation, on a dilated ResNet."""

import fvcore.nn.weight_init as weight_init
import torch
from detectron2.config import configurable
from detectron2.layers import Conv2d, ShapeSpec, get_norm
from detectron2.modeling import SEM_SEG_HEADS_REGISTRY
from torch import nn
from torch.nn import functional as F

from moco_d2.errors import UserError

# Of the two convolutions, in pixels of the feature map (arXiv 1911.05722, A.5).
DILATION = 6


@SEM_SEG_HEADS_REGISTRY.register()
class FCNHead(nn.Module):
    """Two 3x3 convolutions with dilation 6, norm and ReLU, and a 1x1 one to the classes (A.5).

    For detectron2's `SemanticSegmentor`. The loss is taken at full resolution.
    """

    @configurable
    def __init__(
        self,
        input_shape: dict[str, ShapeSpec],
        *,
        num_classes: int,
        conv_dims: int = 256,
        norm: str = "SyncBN",
        ignore_value: int = 255,
        loss_weight: float = 1.0,
    ):
        """
        Args:
            input_shape: channels and stride of the one feature map that is used, by its name.
            num_classes: C.
            conv_dims: channels of the two convolutions.
            norm: what `detectron2.layers.get_norm` knows; "": none, the convolutions get biases.
            ignore_value: label of pixels that do not count. `SemanticSegmentor` reads it, too.
            loss_weight: factor of the loss.

        Raises:
            ValueError: not exactly one feature map.
        """
        super().__init__()
        if len(input_shape) != 1:
            raise UserError(
                "FCNHead takes one feature map, and MODEL.SEM_SEG_HEAD.IN_FEATURES names "
                f"{len(input_shape)} of the backbone's: set it to ['res5']"
            )
        ((self.in_feature, shape),) = input_shape.items()
        self.stride = shape.stride
        self.ignore_value = ignore_value
        self.loss_weight = loss_weight
        self.conv1 = _dilated_conv(shape.channels, conv_dims, norm)
        self.conv2 = _dilated_conv(conv_dims, conv_dims, norm)
        self.predictor = Conv2d(conv_dims, num_classes, kernel_size=1)
        # Close to zero, as detectron2's predictors: training starts from a guess among C classes.
        nn.init.normal_(self.predictor.weight, std=0.01)
        nn.init.zeros_(self.predictor.bias)

    @classmethod
    def from_config(cls, cfg, input_shape: dict[str, ShapeSpec]):
        head = cfg.MODEL.SEM_SEG_HEAD
        return {
            "input_shape": {n: s for n, s in input_shape.items() if n in head.IN_FEATURES},
            "num_classes": head.NUM_CLASSES,
            "conv_dims": head.CONVS_DIM,
            "norm": head.NORM,
            "ignore_value": head.IGNORE_VALUE,
            "loss_weight": head.LOSS_WEIGHT,
        }

    def forward(self, features: dict[str, torch.Tensor], targets: torch.Tensor | None = None):
        """
        Args:
            features: a (N, D, h, w) under the name of the used map.
            targets: labels int64 (N, H, W), H <= h * stride, W <= w * stride; for training.

        Returns:
            logits (N, C, h * stride, w * stride), from which `SemanticSegmentor` cuts the image,
            or None in training; losses by name, none but in training.
        """
        x = features[self.in_feature]
        logits = self.predictor(self.conv2(self.conv1(x))).float()  # (N, C, h, w)
        logits = upsample(logits, self.stride)
        if self.training:
            return None, {"loss_sem_seg": self.loss_weight * self.loss(logits, targets)}
        return logits, {}

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy, averaged over the pixels that count; 0 where none does."""
        height, width = targets.shape[-2:]
        total = F.cross_entropy(
            logits[..., :height, :width], targets, reduction="sum", ignore_index=self.ignore_value
        )
        return total / (targets != self.ignore_value).sum().clamp(min=1)


def _dilated_conv(in_channels: int, out_channels: int, norm: str) -> Conv2d:
    conv = Conv2d(
        in_channels,
        out_channels,
        kernel_size=3,
        padding=DILATION,
        dilation=DILATION,
        bias=not norm,
        norm=get_norm(norm, out_channels),
        activation=F.relu,
    )
    weight_init.c2_msra_fill(conv)
    return conv


def upsample(x: torch.Tensor, stride: int) -> torch.Tensor:
    """Interpolate (N, C, h, w) bilinearly to (N, C, h * stride, w * stride).

    Value (i, j) comes to lie at pixel (i, j) * stride, where a ResNet's receptive fields have their
    centres; pixels right of and below the last ones repeat these. On a crop of 16 n + 1 pixels, as
    513 and 769 are, this is what `align_corners=True` does; with the other rule the map would be
    half a stride off, and by how much would depend on the image's size.
    """
    x = F.pad(x, (0, 1, 0, 1), mode="replicate")
    height, width = ((n - 1) * stride + 1 for n in x.shape[-2:])
    x = F.interpolate(x, (height, width), mode="bilinear", align_corners=True)
    return x[..., :-1, :-1]
