"""Turns masks into polygons that give back the same mask, pixel for pixel."""

import cv2
import numpy as np


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


def _drop_repeated(points: np.ndarray) -> np.ndarray:
    """Points (N, 2) without those that equal their predecessor on the closed outline."""
    return points[np.any(points != np.roll(points, 1, axis=0), axis=1)]
