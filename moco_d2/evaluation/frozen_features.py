"""Pooled features of a frozen backbone: from a weight file of any known format, or random ones."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone, build_backbone
from detectron2.utils.env import seed_all_rng
from torch import Tensor

from moco_d2.checkpoint.convention import convention_of
from moco_d2.checkpoint.naming import NAMINGS
from moco_d2.checkpoint.reading import read_backbone
from moco_d2.checkpoint.verify import architecture_title
from moco_d2.data.index import ImageIndex
from moco_d2.engine.backbones import backbone_architecture, check_architecture
from moco_d2.errors import UserError
from moco_d2.evaluation.features import feature_batches
from moco_d2.modeling.inputs import ImageModel
from moco_d2.modeling.vit import ClassTokenViT, build_vit

# What a ViT needs beside detectron2's tensors to have a class token.
_CLASS_TOKEN = ("cls_token", "norm.weight", "norm.bias")


class FrozenFeatures(ImageModel):
    """A backbone in eval mode behind its input convention, and global average pooling.

    Of a ViT that was trained with a class token, features are those of the token.

    Attributes:
        title: what a user would call the architecture.
        convention: which images it takes, see `checkpoint/convention.py`.
        fingerprint: of all that features depend on but the images: tensors, architecture, input
            convention. Hexadecimal SHA-256.
    """

    def __init__(
        self, backbone: Backbone, architecture: Mapping[str, Any], convention: Mapping[str, Any]
    ):
        """
        Args:
            backbone: its last feature map is pooled.
            architecture: plain Python, see `checkpoint/verify.py`.
            convention: see `checkpoint/convention.py`.
        """
        super().__init__(convention["pixel_mean"], convention["pixel_std"])
        self.backbone = backbone
        self.title = architecture_title(architecture)
        self.convention = dict(convention)
        self._feature = list(backbone.output_shape())[-1]
        self._patch_size = architecture.get("patch_size", 1)
        facts = [self._feature, dict(architecture), self.convention]
        self.fingerprint = _fingerprint(backbone.state_dict(), facts)
        self.eval().requires_grad_(False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """`{"image": uint8 (N, C, H, W)}` in the convention's channel order -> float (N, features),
        not normalised."""
        return self.backbone(self.normalise(batch["image"]))[self._feature].mean(dim=(2, 3))

    def check_size(self, size: int) -> None:
        """
        Args:
            size: side of the images, in pixels.

        Raises:
            UserError: the backbone cannot take such images.
        """
        if size < 1 or size % self._patch_size:
            raise UserError(
                f"images of {size} pixels (--size) do not divide into patches of "
                f"{self._patch_size}; give a multiple of it"
            )


def features_from_file(path: str, **options: Any) -> FrozenFeatures:
    """Read a weight file.

    Args:
        path: a file of one of the formats in `checkpoint/table.py`.
        options: of :func:`moco_d2.checkpoint.read_backbone`.

    Raises:
        WeightsError, CheckError: the file or an option cannot be used.
    """
    source = read_backbone(path, **options)
    if all(name in source.extras for name in _CLASS_TOKEN):
        backbone: Backbone = build_vit(source.architecture, ClassTokenViT)
        tensors = {**source.tensors, **source.extras}
    else:
        backbone = NAMINGS["detectron2"].network(source.architecture, source.convention).body
        tensors = source.tensors
    backbone.load_state_dict(tensors)
    return FrozenFeatures(backbone, source.architecture, source.convention)


def random_features(cfg: CfgNode, seed: int) -> FrozenFeatures:
    """The backbone that a config describes, initialised as a pretraining would begin.

    Raises:
        UserError: it cannot be built.
    """
    check_architecture(cfg)
    seed_all_rng(seed)
    return FrozenFeatures(build_backbone(cfg), backbone_architecture(cfg), convention_of(cfg))


def finite_batches(
    network: FrozenFeatures, index: ImageIndex, numbers: np.ndarray, title: str, **options: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features of images, read as the network's input convention asks; see `feature_batches`.

    Args:
        numbers: of images, int64 (M,).
        title: what to call the network in errors.
        options: of :func:`moco_d2.data.build.build_eval_loader`.

    Raises:
        UserError: a feature is not a finite number, or too many images cannot be read.
    """
    pixels = {key: network.convention[key] for key in ("pixel_mean", "format")}
    for shown, features in feature_batches(network, index, numbers, **pixels, **options):
        if not torch.isfinite(features).all():
            raise UserError(
                f"{title}: features of {index.path(int(shown[0]))} and others are not finite "
                "numbers; the weights are those of a training that failed"
            )
        yield shown, features


def _fingerprint(tensors: Mapping[str, Tensor], facts: Any) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(torch.atleast_1d(tensor).contiguous().numpy())
    return digest.hexdigest()
