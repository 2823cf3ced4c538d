"""A sheet of views, as the encoders see them."""

import cv2
import numpy as np
from detectron2.config import CfgNode

from moco_d2.data.build import build_pretrain_loader, pixel_options
from moco_d2.data.pixels import PixelFormat
from moco_d2.engine.images import ImageTrainer
from moco_d2.engine.setup import trainer_of
from moco_d2.errors import UserError
from moco_d2.visualization.tiles import (
    WHITE,
    framed,
    grid,
    original,
    shown_view,
    tile,
    write_picture,
)

_SIDE = 112  # pixels at least
_GAP = 2
_NAMES = ("query", "key")


def draw_view_pairs(cfg: CfgNode, path: str, *, pairs: int = 24, columns: int = 4) -> None:
    """Write a picture of the first images of a pretraining run: image, query's view, key's view.

    Args:
        cfg: an effective pretraining config; its seed decides what is shown.
        path: of the PNG.
        pairs: number of images.
        columns: images in a row.

    Raises:
        UserError: the config is not of a pretraining.
    """
    trainer, views = trainer_of(cfg), cfg.INPUT.VIEWS
    if not issubclass(trainer, ImageTrainer):
        raise UserError(
            f"{cfg.MODEL.META_ARCHITECTURE} is not trained on views: name the config of a "
            "pretraining or of a classification"
        )
    index, recipes, options = (
        trainer.training_images(cfg),
        trainer.view_recipes(cfg),
        pixel_options(cfg),
    )
    (batch,) = build_pretrain_loader(
        index,
        batch_size=pairs,
        size=views.SIZE,
        recipes=recipes,
        seed=cfg.SEED,
        num_iters=1,
        min_crop=views.MIN_CROP,
        **options,
    )
    pixels = PixelFormat(tuple(options["pixel_mean"]), options["deep_range"], options["max_pixels"])
    side = max(_SIDE, views.SIZE)
    tiles = []
    for number, *shown in zip(batch["index"].tolist(), *batch["views"], strict=True):
        images = [original(index, number, pixels)]
        images += [shown_view(view, cfg.INPUT.FORMAT) for view in shown]
        row = np.hstack([framed(tile(image, side), _GAP) for image in images])
        tiles.append(
            cv2.copyMakeBorder(row, 0, 0, 0, 6 * _GAP, cv2.BORDER_CONSTANT, value=(WHITE,) * 3)
        )
    sheet = grid(tiles, min(columns, pairs))
    named = zip(_NAMES, recipes, strict=False)
    text = ["image", *(f"{name} ({recipe})" for name, recipe in named)]
    write_picture(path, np.vstack([_title(f"{' | '.join(text)}, {views.SIZE} px", sheet), sheet]))


def _title(text: str, sheet: np.ndarray) -> np.ndarray:
    strip = np.full((28, sheet.shape[1], 3), WHITE, np.uint8)
    cv2.putText(strip, text, (4, 19), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (31, 35, 40), 1, cv2.LINE_AA)
    return strip
