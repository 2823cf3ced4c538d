"""Large-scale jitter (arXiv 2012.07177): the augmentation that ViTDet trains with."""

from collections.abc import Callable

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from fvcore.transforms.transform import CropTransform

# Smallest and largest side of an image, in INPUT.SCALE_JITTER.
SCALES = (0.1, 2.0)


def scale_jitter_mapper(cfg: CfgNode) -> Callable[[dict], dict]:
    """detectron2's mapper, with images of random size cropped to at most a square.

    As `projects/ViTDet/configs/common/coco_loader_lsj.py` of detectron2: flip, resize to fit into a
    square of 0.1 to 2 times `INPUT.SCALE_JITTER` pixels, crop at random to `INPUT.SCALE_JITTER`.
    With masks, what remains of a cut object gets a new box.
    """
    size = cfg.INPUT.SCALE_JITTER
    return DatasetMapper(
        cfg,
        is_train=True,
        augmentations=[
            T.RandomFlip(horizontal=True),
            T.ResizeScale(*SCALES, target_height=size, target_width=size),
            SquareCrop(size),
        ],
        recompute_boxes=cfg.MODEL.MASK_ON,
    )


class SquareCrop(T.Augmentation):
    """detectron2's `FixedSizeCrop` without padding, which needs no shapely to cut polygons."""

    def __init__(self, size: int):
        """
        Args:
            size: the longest side that is left, in pixels.
        """
        super().__init__()
        self.size = size

    def get_transform(self, image: np.ndarray) -> T.Transform:
        height, width = image.shape[:2]
        h, w = min(height, self.size), min(width, self.size)
        place = np.random.uniform()  # one draw for both directions, as detectron2's
        y0, x0 = round((height - h) * place), round((width - w) * place)
        return _PolygonCrop(x0, y0, w, h, width, height)


class _PolygonCrop(CropTransform):
    def apply_polygons(self, polygons: list[np.ndarray]) -> list[np.ndarray]:
        moved = (polygon - (self.x0, self.y0) for polygon in polygons)
        cut = (clip_polygon(polygon, self.w, self.h) for polygon in moved)
        return [polygon for polygon in cut if len(polygon) >= 3]


def clip_polygon(polygon: np.ndarray, width: float, height: float) -> np.ndarray:
    """The part of a polygon inside [0, width] x [0, height] (Sutherland and Hodgman, 1974).

    Args:
        polygon: float (n, 2), x and y of its corners in turn.

    Returns:
        float (m, 2); m is 0 if nothing is inside. Parts of a concave polygon stay connected by
        edges on the border, which enclose nothing.
    """
    for axis, sign, bound in ((0, 1, 0.0), (0, -1, width), (1, 1, 0.0), (1, -1, height)):
        depth = sign * (polygon[:, axis] - bound)  # inside: 0 or more
        beyond = np.roll(depth, -1)  # of the next corner
        crosses = (depth >= 0) != (beyond >= 0)
        share = np.divide(depth, depth - beyond, out=np.zeros_like(depth), where=crosses)
        crossing = polygon + share[:, None] * (np.roll(polygon, -1, 0) - polygon)
        corners = np.stack([polygon, crossing], 1)  # (n, 2, 2), in the order of the outline
        polygon = corners[np.stack([depth >= 0, crosses], 1)]
    return polygon
