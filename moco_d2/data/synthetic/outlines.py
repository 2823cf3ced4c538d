"""Turns masks into boxes and into polygons that give back the same mask, pixel for pixel."""

import cv2
import numpy as np


def mask_to_box(mask: np.ndarray) -> tuple[int, int, int, int]:
    """The smallest box x0, y0, x1, y1 around a mask that is not empty; x1 and y1 are exclusive."""
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def mask_to_polygons(mask: np.ndarray) -> list[list[float]]:
    """Outline a mask along the borders of its pixels.

    Polygons cannot have holes in the COCO format, so a part with a hole is cut in two through the
    hole; the parts share the cut, and their union has neither gap nor overlap.

    Args:
        mask: bool (H, W).

    Returns:
        One flat list x0, y0, x1, y1, ... of whole numbers per part; pixel (x, y) is the square
        from (x, y) to (x + 1, y + 1). Floats, since detectron2 would scale polygons of integers
        with truncation. Empty for an empty mask.
    """
    # Contours run through the centres of border pixels. With every pixel enlarged to 3x3, centres
    # 3i and 3i + 2 tell its two sides apart, and (c + 1) // 3 is the pixel border that c lies at.
    enlarged = np.repeat(np.repeat(mask.astype(np.uint8), 3, axis=0), 3, axis=1)
    contours, tree = cv2.findContours(enlarged, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    corners = [(contour[:, 0] + 1) // 3 for contour in contours]
    parents = [] if tree is None else tree[0, :, 3]
    for outline, parent in zip(corners, parents, strict=True):
        if parent >= 0:  # the outline of a hole
            cut = int(outline[:, 0].min() + outline[:, 0].max()) // 2
            left, right = mask.copy(), mask.copy()
            left[:, cut:], right[:, :cut] = False, False
            return mask_to_polygons(left) + mask_to_polygons(right)
    return [_drop_repeated(outline).ravel().astype(float).tolist() for outline in corners]


def mask_to_outline(mask: np.ndarray) -> list[list[int]]:
    """Outline a mask by a single polygon through the centres of its border pixels.

    This is how Cityscapes draws, with the pixels on the outline counted in. Holes and further
    parts are reached over a line that goes there and back; it has the width of a pixel, which is
    one too many where it crosses what is not in the mask.

    Args:
        mask: bool (H, W), not empty.

    Returns:
        corners [x, y] of the polygon.
    """
    contours, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    first, *others = sorted((c[:, 0] for c in contours), key=cv2.contourArea, reverse=True)
    for other in others:
        distance = np.abs(first[:, None] - other).sum(axis=2)
        here, there = np.unravel_index(distance.argmin(), distance.shape)
        loop = np.roll(other, -there, axis=0)
        first = np.concatenate([first[: here + 1], loop, loop[:1], first[here:]])
    return first.tolist()


def _drop_repeated(points: np.ndarray) -> np.ndarray:
    """Points (N, 2) without those that equal their predecessor on the closed outline."""
    return points[np.any(points != np.roll(points, 1, axis=0), axis=1)]
