"""A sheet of query and key views, as the encoders see them."""

import cv2
import numpy as np
from detectron2.config import CfgNode

from moco_d2.data.build import build_pretrain_loader, pixel_options
from moco_d2.data.datasets import load_image_index
from moco_d2.data.image_io import read_image

_GAP = 4  # pixels between tiles


def draw_view_pairs(cfg: CfgNode, path: str, *, pairs: int = 24, columns: int = 6) -> None:
    """Write a picture of the first images of a pretraining run: image, query's view, key's view.

    Args:
        cfg: an effective pretraining config; its seed decides what is shown.
        path: of the PNG.
        pairs: number of images.
        columns: images in a row.
    """
    index = load_image_index(tuple(cfg.DATASETS.TRAIN))
    views = cfg.INPUT.VIEWS
    loader = build_pretrain_loader(
        index,
        batch_size=pairs,
        size=views.SIZE,
        recipes=(views.QUERY, views.KEY),
        seed=cfg.SEED,
        num_iters=1,
        min_crop=views.MIN_CROP,
        **pixel_options(cfg),
    )
    (batch,) = loader
    side = max(96, views.SIZE)
    tiles = []
    for number, query, key in zip(batch["index"].tolist(), *batch["views"], strict=True):
        original = read_image(index.path(number), cfg.MODEL.PIXEL_MEAN)  # RGB
        shown = [_to_bgr(v.permute(1, 2, 0).numpy(), cfg.INPUT.FORMAT) for v in (query, key)]
        tiles.append(np.hstack([_tile(i, side) for i in (_to_bgr(original, "RGB"), *shown)]))
    rows = [np.hstack(_pad(tiles[i : i + columns], columns)) for i in range(0, pairs, columns)]
    title = np.full((28, rows[0].shape[1], 3), 255, np.uint8)
    text = f"image | query ({views.QUERY}) | key ({views.KEY}), {views.SIZE} px"
    cv2.putText(title, text, (6, 20), cv2.FONT_HERSHEY_SIMPLEX, 0.55, (0, 0, 0), 1, cv2.LINE_AA)
    cv2.imwrite(path, np.vstack([title, *rows]))


def _to_bgr(image: np.ndarray, channels: str) -> np.ndarray:
    return image[..., ::-1] if channels == "RGB" else image


def _tile(image: np.ndarray, side: int) -> np.ndarray:
    """Scale an image to fit a square, centred on white."""
    scale = side / max(image.shape[:2])
    size = [max(1, round(s * scale)) for s in image.shape[1::-1]]
    image = cv2.resize(np.ascontiguousarray(image), size, interpolation=cv2.INTER_AREA)
    tile = np.full((side + _GAP, side + _GAP, 3), 255, np.uint8)
    top, left = (side - image.shape[0]) // 2, (side - image.shape[1]) // 2
    tile[top : top + image.shape[0], left : left + image.shape[1]] = image
    return tile


def _pad(tiles: list[np.ndarray], count: int) -> list[np.ndarray]:
    return tiles + [np.full_like(tiles[0], 255)] * (count - len(tiles))
