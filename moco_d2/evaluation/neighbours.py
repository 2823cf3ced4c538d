"""Pictures of some test images with what their features find nearest, for TensorBoard."""

import numpy as np
import torch
from detectron2.config import CfgNode
from torch import Tensor

from moco_d2.data.build import build_eval_loader, pixel_options
from moco_d2.data.index import ImageIndex
from moco_d2.evaluation.knn import nearest_neighbours
from moco_d2.visualization.boards import neighbour_board

_QUERIES, _NEIGHBOURS = 8, 6


def draw_neighbours(
    cfg: CfgNode,
    queries: tuple[ImageIndex, Tensor, Tensor],
    bank: tuple[ImageIndex, Tensor, Tensor] | None,
) -> Tensor:
    """A row for each of eight test images, the same every time: itself and its nearest neighbours,
    framed green where they have its label and orange where not.

    Args:
        cfg: says how images are read.
        queries: the test images, float (N, C) L2-normalised features, and int64 (N,), which images.
        bank: the same of those that are searched; None: the test images themselves.

    Returns:
        uint8 (3, height, width), RGB.
    """
    index, features, shown = queries
    places = torch.linspace(0, len(shown) - 1, min(_QUERIES, len(shown))).long()
    bank_index, bank_features, bank_shown = bank or queries
    own = None if bank else places
    _, near = nearest_neighbours(bank_features, features[places], _NEIGHBOURS, own)
    shown, near = shown[places], bank_shown[near]  # numbers of images
    images = _images(cfg, index, shown)
    found = _images(cfg, bank_index, near.flatten()).unflatten(0, near.shape)
    same = torch.from_numpy(bank_index.labels[near.numpy()] == index.labels[shown.numpy(), None])
    return neighbour_board(images, found, same, cfg.INPUT.FORMAT)


def _images(cfg: CfgNode, index: ImageIndex, numbers: Tensor) -> Tensor:
    """Centre crops, uint8 (M, channels, H, W), of images that can be read."""
    distinct, place = np.unique(numbers.numpy(), return_inverse=True)
    loader = build_eval_loader(
        index,
        size=cfg.INPUT.VIEWS.SIZE,
        batch_size=len(distinct),
        indices=distinct,
        **pixel_options(cfg),
    )
    (batch,) = loader
    return batch["image"][torch.from_numpy(place)]
