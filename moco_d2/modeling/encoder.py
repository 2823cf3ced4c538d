"""Encoder = detectron2 backbone + global average pooling + projection head."""

from collections.abc import Callable

import torch
from detectron2.config import CfgNode
from detectron2.layers import CNNBlockBase
from detectron2.modeling import Backbone, build_backbone
from torch import Tensor, nn

from moco_d2.modeling.batch_norm import BatchNormGroups, GroupedBatchNorm2d, group_batch_norms_
from moco_d2.modeling.heads import build_projection_head
from moco_d2.modeling.vit import freeze_patch_projection_


class Encoder(nn.Module):
    """Maps images to representations, with BN statistics per group of images."""

    def __init__(self, backbone: Backbone, feature: str, head: nn.Module, groups: BatchNormGroups):
        """
        Args:
            backbone: any detectron2 backbone that returns `feature`. Its batch norms, and the
                head's, are made grouped ones in place.
            feature: name of the feature map that is pooled, e.g. "res5". A ViT's class token is a
                map of one cell.
            head: (N, channels of the feature) -> (N, C).
            groups: which images share statistics.
        """
        super().__init__()
        self.backbone = group_batch_norms_(backbone, groups)
        self.feature = feature
        self.head = group_batch_norms_(head, groups)
        self.groups = groups
        self._is_grouped = any(isinstance(m, GroupedBatchNorm2d) for m in backbone.modules())
        if groups.channels_last:
            self.to(memory_format=torch.channels_last)

    def features(self, images: Tensor) -> Tensor:
        """Pooled backbone features.

        Args:
            images: float (N, 3, H, W), normalised.

        Returns:
            (N, channels of the feature), in the order of the images.
        """
        order = None
        if self.training and self._is_grouped:
            order = self.groups.memory_order(len(images), images.device)
        if order is not None:
            images = images.index_select(0, order)
        if self.groups.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        pooled = self.backbone(images)[self.feature].mean(dim=(2, 3))  # (N, C, H, W) -> (N, C)
        return pooled if order is None else pooled[order.argsort()]

    def forward(self, images: Tensor) -> Tensor:
        """float (N, 3, H, W), normalised -> (N, C)."""
        return self.head(self.features(images))


def build_encoder(
    cfg: CfgNode, forwards: int = 1, build_head: Callable[[int], nn.Module] | None = None
) -> Encoder:
    """Build the encoder that a config describes, around `MODEL.BACKBONE.NAME`.

    Args:
        forwards: of a part of a step, each with all of its images: one per view that is encoded,
            as a query or as a key.
        build_head: makes the head for features of so many channels; None: the projection head of
            `MODEL.MOCO`.
    """
    backbone = build_backbone(cfg)
    if cfg.MODEL.RESNETS.ZERO_INIT_RESIDUAL:
        zero_init_residual_(backbone)
    feature = list(backbone.output_shape())[-1]
    width = backbone.output_shape()[feature].channels
    moco = cfg.MODEL.MOCO
    if moco.FREEZE_PATCH_PROJECTION:
        freeze_patch_projection_(backbone)
    if build_head is None:
        head = build_projection_head(moco.HEAD, width, moco.MLP_DIM, moco.DIM, moco.HEAD_LAYERS)
    else:
        head = build_head(width)
    groups = BatchNormGroups(
        cfg.MODEL.BN_GROUP_SIZE, cfg.MODEL.CHANNELS_LAST, forwards * cfg.SOLVER.ACCUMULATE
    )
    return Encoder(backbone, feature, head, groups)


def zero_init_residual_(backbone: nn.Module) -> None:
    """Let every residual block of a ResNet begin as the identity: zero the scale of its last norm
    (Sec. 5.1 of arXiv 1706.02677)."""
    for block in backbone.modules():
        if isinstance(block, CNNBlockBase) and hasattr(block, "shortcut"):
            last = block.conv3 if hasattr(block, "conv3") else block.conv2
            if last.norm is not None:
                nn.init.zeros_(last.norm.weight)
