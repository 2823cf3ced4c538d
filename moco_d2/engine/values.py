"""Values of a config that nothing could be trained with, refused before anything is started."""

from collections.abc import Sequence

import torch
from detectron2.config import CfgNode

from moco_d2.data.augmentation import get_view_recipe
from moco_d2.engine.hooks import momentum_schedule
from moco_d2.engine.norm import SYNCHRONISED
from moco_d2.errors import UserError
from moco_d2.modeling.heads import check_projection_head
from moco_d2.solver.build import check_optimizer

# What detectron2 knows.
SCHEDULERS = ("WarmupMultiStepLR", "WarmupCosineLR", "WarmupStepWithFixedGammaLR")
WARMUPS = ("linear", "constant")
CLIPPING = ("value", "norm")
SAMPLING = ("choice", "range")
CHANNELS = {"BGR": 3, "RGB": 3, "YUV-BT.601": 3, "L": 1}  # INPUT.FORMAT -> of a picture


def check_values(cfg: CfgNode) -> None:
    """Refuse what no run can have, whatever is trained.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    solver, model = cfg.SOLVER, cfg.MODEL
    for key, value, known in (
        ("LR_SCHEDULER_NAME", solver.LR_SCHEDULER_NAME, SCHEDULERS),
        ("WARMUP_METHOD", solver.WARMUP_METHOD, WARMUPS),
    ):
        if value not in known:
            raise UserError(f"SOLVER.{key} is {value!r}; known: {', '.join(known)}")
    for key, value, least in (
        ("LOG_PERIOD", cfg.LOG_PERIOD, 1),
        ("SOLVER.IMS_PER_BATCH", solver.IMS_PER_BATCH, 1),
        ("DATALOADER.NUM_WORKERS", cfg.DATALOADER.NUM_WORKERS, 0),
        ("MONITORS.PERIOD", cfg.MONITORS.PERIOD, 0),
        ("MONITORS.PICTURE_PERIOD", cfg.MONITORS.PICTURE_PERIOD, 0),
    ):
        if value < least:
            raise UserError(f"{key} is {value}; it must be at least {least}")
    if solver.MAX_ITER < 1 and solver.EPOCHS < 1:
        raise UserError(f"SOLVER.MAX_ITER is {solver.MAX_ITER}; it must be at least 1")
    if solver.BASE_LR <= 0:
        raise UserError(f"SOLVER.BASE_LR is {solver.BASE_LR:g}; it must be above 0")
    clipping = solver.CLIP_GRADIENTS
    if clipping.ENABLED and clipping.CLIP_TYPE not in CLIPPING:
        raise UserError(
            f"SOLVER.CLIP_GRADIENTS.CLIP_TYPE is {clipping.CLIP_TYPE!r}; known: "
            f"{', '.join(CLIPPING)}"
        )
    check_device(model.DEVICE, "MODEL.DEVICE")
    mean, std = model.PIXEL_MEAN, model.PIXEL_STD
    if len(mean) != len(std) or min(std, default=0) <= 0:
        raise UserError(
            f"MODEL.PIXEL_MEAN {mean} and PIXEL_STD {std} need a value for each channel, and "
            "deviations above 0"
        )


def check_device(device: str, key: str) -> None:
    """
    Args:
        key: what names the device, for errors.

    Raises:
        UserError: torch knows no such device.
    """
    try:
        torch.device(device)
    except RuntimeError as error:
        raise UserError(f"{key} is {device!r}; give cpu, cuda or cuda:N") from error


def check_image_values(cfg: CfgNode, recipes: Sequence[str]) -> None:
    """Refuse what no training on views of images can have.

    Args:
        recipes: names of the view recipes.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    check_optimizer(cfg.SOLVER)
    if cfg.INPUT.VIEWS.SIZE < 1:
        raise UserError(f"INPUT.VIEWS.SIZE is {cfg.INPUT.VIEWS.SIZE}; it must be at least 1")
    for recipe in recipes:
        get_view_recipe(recipe)
    norm = cfg.MODEL.RESNETS.NORM
    if norm in SYNCHRONISED or norm.startswith("naiveSyncBN"):
        raise UserError(
            f"MODEL.RESNETS.NORM is {norm}: in pretraining MODEL.BN_GROUP_SIZE says which images "
            "share statistics (0: the whole batch, as SyncBN); set MODEL.RESNETS.NORM to BN"
        )
    knn = cfg.TEST.KNN
    if knn.K < 1 or knn.TEMPERATURE <= 0:
        raise UserError(
            f"TEST.KNN.K is {knn.K} and TEMPERATURE {knn.TEMPERATURE:g}; give at least 1 neighbour "
            "and a temperature above 0"
        )


def check_detector_values(cfg: CfgNode) -> None:
    """Refuse pictures that detectron2 cannot make, or that the model does not take.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    given, mean = cfg.INPUT, cfg.MODEL.PIXEL_MEAN
    if given.FORMAT not in CHANNELS:
        raise UserError(f"INPUT.FORMAT is {given.FORMAT!r}; known: {', '.join(CHANNELS)}")
    if len(mean) != CHANNELS[given.FORMAT]:
        raise UserError(
            f"MODEL.PIXEL_MEAN {list(mean)} is for {len(mean)} channels, and INPUT.FORMAT "
            f"{given.FORMAT} has {CHANNELS[given.FORMAT]}"
        )
    if given.MIN_SIZE_TRAIN_SAMPLING not in SAMPLING:
        raise UserError(
            f"INPUT.MIN_SIZE_TRAIN_SAMPLING is {given.MIN_SIZE_TRAIN_SAMPLING!r}; known: "
            f"{', '.join(SAMPLING)}"
        )
    sizes = given.MIN_SIZE_TRAIN
    if not sizes or given.MIN_SIZE_TRAIN_SAMPLING == "range" and len(sizes) != 2:
        raise UserError(
            f"INPUT.MIN_SIZE_TRAIN is {tuple(sizes)}; give at least one size for choice, and the "
            "smallest and the largest for range"
        )


def check_moco_values(moco: CfgNode) -> None:
    """Refuse what neither MoCo nor MoCoV3 can have.

    Args:
        moco: `MODEL.MOCO`.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    check_projection_head(moco.HEAD, moco.MLP_DIM, moco.DIM, moco.HEAD_LAYERS)
    momentum_schedule(moco.MOMENTUM_SCHEDULE)
    if not 0.0 <= moco.MOMENTUM < 1.0:
        raise UserError(f"MODEL.MOCO.MOMENTUM is {moco.MOMENTUM}; it must lie in [0, 1)")
    if moco.TEMPERATURE <= 0:
        raise UserError(f"MODEL.MOCO.TEMPERATURE is {moco.TEMPERATURE}; it must be above 0")
