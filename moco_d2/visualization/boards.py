"""Boards of small pictures for TensorBoard: views that are pairs, and nearest neighbours."""

import torch
import torch.nn.functional as F
from torch import Tensor

_GAP = 2  # pixels between pictures
_FRAME = 3  # pixels around a neighbour
# RGB of the frame: the query's label, another one; told apart by colour-blind eyes, as in style.py,
# which needs matplotlib.
_SAME, _OTHER = (0, 158, 115), (213, 94, 0)


def view_board(views: list[Tensor], order: str) -> Tensor:
    """Each image's views below each other.

    Args:
        views: of the queries and of the keys, uint8 (N, channels, H, W).
        order: of three channels, "RGB" or "BGR".

    Returns:
        uint8 (3, height, width), RGB.
    """
    return _board([_rgb(view, order) for view in views])


def neighbour_board(images: Tensor, neighbours: Tensor, same_label: Tensor, order: str) -> Tensor:
    """A row for each image: itself, then its nearest neighbours, framed green where they have its
    label and orange where not.

    Args:
        images: uint8 (N, channels, H, W).
        neighbours: uint8 (N, k, channels, H, W), nearest first.
        same_label: bool (N, k).
        order: of three channels, "RGB" or "BGR".

    Returns:
        uint8 (3, height, width), RGB.
    """
    rows = []
    for image, near, same in zip(images, neighbours, same_label.tolist(), strict=True):
        white = [(255, 255, 255)]
        colours = torch.tensor(white + [_SAME if s else _OTHER for s in same], dtype=torch.uint8)
        row = _rgb(torch.cat([image[None], near]), order)
        framed = F.pad(row, (_FRAME,) * 4)
        inside = F.pad(torch.ones_like(row, dtype=torch.bool), (_FRAME,) * 4)
        rows.append(torch.where(inside, framed, colours[:, :, None, None]))
    return _board(rows)


def _rgb(images: Tensor, order: str) -> Tensor:
    """uint8 (N, channels, H, W) -> RGB; of other than three channels the first, as grey."""
    images = images.cpu()
    if images.shape[1] != 3:
        return images[:, :1].expand(-1, 3, -1, -1)
    return images.flip(1) if order == "BGR" else images


def _board(rows: list[Tensor]) -> Tensor:
    """Rows of equally many pictures, uint8 (n, 3, H, W) each -> uint8 (3, height, width)."""
    padded = [F.pad(row, (_GAP,) * 4, value=255) for row in rows]
    return torch.cat([torch.cat(list(row), dim=2) for row in padded], dim=1)
