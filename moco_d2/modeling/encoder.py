"""Encoder = detectron2 backbone + global average pooling + projection head."""

from collections.abc import Callable

import torch
from detectron2.config import CfgNode
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
            backbone: any detectron2 backbone that returns `feature`. Its batch norms are made
                grouped ones in place.
            feature: name of the feature map that is pooled, e.g. "res5". A ViT's class token is a
                map of one cell.
            head: (N, channels of the feature) -> (N, C).
            groups: which images share statistics.
        """
        super().__init__()
        self.backbone = group_batch_norms_(backbone, groups)
        self.feature = feature
        self.head = head
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


def build_encoder(cfg: CfgNode, build_head: Callable[[int], nn.Module] | None = None) -> Encoder:
    """Build the encoder that a config describes, around `MODEL.BACKBONE.NAME`.

    Args:
        build_head: makes the head for features of so many channels; None: the projection head of
            `MODEL.MOCO`.
    """
    backbone = build_backbone(cfg)
    feature = list(backbone.output_shape())[-1]
    width = backbone.output_shape()[feature].channels
    moco = cfg.MODEL.MOCO
    if moco.FREEZE_PATCH_PROJECTION:
        freeze_patch_projection_(backbone)
    if build_head is None:
        head = build_projection_head(moco.HEAD, width, moco.MLP_DIM, moco.DIM)
    else:
        head = build_head(width)
    groups = BatchNormGroups(
        cfg.MODEL.BN_GROUP_SIZE, cfg.MODEL.CHANNELS_LAST, cfg.SOLVER.ACCUMULATE
    )
    return Encoder(backbone, feature, head, groups)
