"""From a config to the recipe that really runs, checked: iterations, lr, BN groups, device."""

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from tabulate import tabulate

from moco_d2.engine.backbones import backbone_title, has_batch_norm, is_vit
from moco_d2.engine.mechanism import (
    batch_key_rows,
    check_batch_keys,
    check_dictionary,
    dictionary_rows,
)
from moco_d2.engine.values import check_moco_values
from moco_d2.errors import UserError


def resolve_device(cfg: CfgNode) -> list[str]:
    """Set MODEL.DEVICE to what the machine has, in place; returns a note when that changed it."""
    if cfg.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available():
        cfg.MODEL.DEVICE = "cpu"
        return ["MODEL.DEVICE cuda -> cpu: no CUDA on this machine"]
    return []


def resolve_seed(cfg: CfgNode) -> list[str]:
    """Draw SEED where none is given, in place and for all processes; returns notes."""
    if cfg.SEED >= 0:
        return []
    cfg.SEED = comm.shared_random_seed() % 2**31
    return [f"SEED -> {cfg.SEED}, drawn at random"]


def check_share(cfg: CfgNode, world_size: int) -> int:
    """The images of a process in each step.

    Raises:
        UserError: the processes cannot share the batch equally.
    """
    batch = cfg.SOLVER.IMS_PER_BATCH
    if batch < 1 or batch % world_size:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {batch} does not divide by {world_size} processes; the nearest "
            f"that do are {_nearest(batch, world_size)}"
        )
    return batch // world_size


def check_groups(cfg: CfgNode, world_size: int) -> None:
    """Refuse a batch that does not fall into BN groups, on processes and in parts of a step.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    share = check_share(cfg, world_size)
    batch, group = cfg.SOLVER.IMS_PER_BATCH, cfg.MODEL.BN_GROUP_SIZE
    if not has_batch_norm(cfg):
        group = 1  # every image is on its own
    elif group == 1 or batch == 1:
        raise UserError(
            f"MODEL.BN_GROUP_SIZE {group} with SOLVER.IMS_PER_BATCH {batch} makes BN groups of one "
            "image, whose statistics are those of the image itself, so that nothing can be "
            "learned; use groups of at least 8"
        )
    if group > 0 and not _tiles(group, share, batch):
        fitting = [g for g in range(2, batch + 1) if _tiles(g, share, batch)]
        near = sorted(sorted(fitting, key=lambda g: abs(g - group))[:2])
        raise UserError(
            f"BN groups of {group} images (MODEL.BN_GROUP_SIZE) do not tile a batch of {batch} on "
            f"{world_size} process(es); the nearest sizes that do are {near}, or 0 for the whole "
            "batch"
        )
    parts = cfg.SOLVER.ACCUMULATE
    if parts != 1 and not _splits(share, group, parts):
        groups = f" of whole BN groups of {group or batch} images (MODEL.BN_GROUP_SIZE)"
        raise UserError(
            f"SOLVER.ACCUMULATE {parts} does not divide {share} images per process into equal parts"
            f"{groups if has_batch_norm(cfg) else ''}; possible here: "
            f"{[p for p in range(1, share + 1) if p == 1 or _splits(share, group, p)]}"
        )


def check_pretraining(cfg: CfgNode, num_images: int, world_size: int) -> list[str]:
    """Refuse a config of MoCo that cannot run or cannot learn.

    Args:
        num_images: size of the data set.
        world_size: number of processes.

    Returns:
        warnings about what runs but is known to go wrong.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    check_moco_values(cfg.MODEL.MOCO)
    check_groups(cfg, world_size)
    check_frozen(cfg)
    if cfg.DATASETS.FEW_LABELS:
        raise UserError(
            f"DATASETS.FEW_LABELS {cfg.DATASETS.FEW_LABELS:g} is for training with labels, and "
            f"{cfg.MODEL.META_ARCHITECTURE} uses none; set it to 0.0"
        )
    check = check_batch_keys if cfg.MODEL.META_ARCHITECTURE == "MoCoV3" else check_dictionary
    warnings = check(cfg, num_images)
    if is_vit(cfg) and cfg.MODEL.VIT.IMG_SIZE != cfg.INPUT.VIEWS.SIZE:
        warnings.append(
            f"MODEL.VIT.IMG_SIZE {cfg.MODEL.VIT.IMG_SIZE} is not INPUT.VIEWS.SIZE "
            f"{cfg.INPUT.VIEWS.SIZE}: the ViT's positions are stretched to the views"
        )
    return warnings


def check_checkpoints(cfg: CfgNode) -> None:
    """Refuse numbers of checkpoints to keep that mean nothing."""
    solver = cfg.SOLVER
    if solver.CHECKPOINT_KEEP < 0:
        raise UserError(
            f"SOLVER.CHECKPOINT_KEEP is {solver.CHECKPOINT_KEEP}; give how many checkpoints to "
            "keep, or 0 for all"
        )
    period, archived = solver.CHECKPOINT_PERIOD, solver.CHECKPOINT_ARCHIVE_PERIOD
    if archived < 0 or (archived and (period < 1 or archived % period)):
        raise UserError(
            f"SOLVER.CHECKPOINT_ARCHIVE_PERIOD is {archived}; it must be a multiple of "
            f"SOLVER.CHECKPOINT_PERIOD {period}, or 0 for none"
        )


def check_frozen(cfg: CfgNode) -> None:
    """Refuse a ResNet that is frozen, in part or in its norms, at random weights."""
    if cfg.MODEL.WEIGHTS or is_vit(cfg):
        return
    if cfg.MODEL.RESNETS.NORM == "FrozenBN":
        raise UserError(
            "MODEL.RESNETS.NORM FrozenBN without MODEL.WEIGHTS is a network with random weights "
            "and no normalisation at all, which cannot learn; set it to BN or SyncBN"
        )
    if cfg.MODEL.BACKBONE.FREEZE_AT > 0:
        raise UserError(
            f"MODEL.BACKBONE.FREEZE_AT {cfg.MODEL.BACKBONE.FREEZE_AT} without MODEL.WEIGHTS "
            "freezes layers at their random initialisation; set it to 0"
        )


def _tiles(group: int, share: int, batch: int) -> bool:
    return batch % group == 0 and (share % group == 0 or group % share == 0)


def _splits(share: int, group: int, parts: int) -> bool:
    return parts > 0 and group > 0 and share % (parts * group) == 0


def _nearest(batch: int, world_size: int) -> str:
    below = batch // world_size * world_size
    return " and ".join(str(b) for b in (below, below + world_size) if b > 0)


def resolve_schedule(cfg: CfgNode, num_images: int) -> list[str]:
    """Turn epochs into iterations and scale the lr, in place; a resolved config stays as it is.

    Args:
        num_images: N; an epoch is N / IMS_PER_BATCH iterations, not necessarily a whole number.

    Returns:
        a note per change.
    """
    solver, notes = cfg.SOLVER, []
    batch = solver.IMS_PER_BATCH
    if solver.EPOCHS > 0:
        epochs = solver.EPOCHS
        solver.MAX_ITER = max(1, epochs * num_images // batch)
        solver.STEPS = tuple(int(step * num_images // batch) for step in solver.STEPS)
        notes.append(
            f"SOLVER.EPOCHS {epochs} x {num_images} images / {batch} -> MAX_ITER "
            f"{solver.MAX_ITER}, STEPS {solver.STEPS}"
        )
        if solver.WARMUP_EPOCHS > 0:
            solver.WARMUP_ITERS = int(solver.WARMUP_EPOCHS * num_images // batch)
            notes.append(f"SOLVER.WARMUP_EPOCHS -> WARMUP_ITERS {solver.WARMUP_ITERS}")
        solver.EPOCHS, solver.WARMUP_EPOCHS = 0, 0.0
    if solver.SCALE_LR_TO_BATCH:
        base = solver.BASE_LR
        solver.BASE_LR = base * batch / solver.REFERENCE_BATCH
        solver.SCALE_LR_TO_BATCH = False
        notes.append(
            f"SOLVER.BASE_LR {base:g} x {batch} / {solver.REFERENCE_BATCH} -> {solver.BASE_LR:g}"
        )
    kept = tuple(step for step in solver.STEPS if step < solver.MAX_ITER)
    if kept != tuple(solver.STEPS):
        notes.append(f"SOLVER.STEPS {solver.STEPS} -> {kept}: the others lie past the end")
        solver.STEPS = kept
    if solver.RESCALE_INTERVAL and solver.WARMUP_ITERS >= solver.MAX_ITER:
        raise UserError(
            f"SOLVER.WARMUP_ITERS {solver.WARMUP_ITERS} leaves nothing of {solver.MAX_ITER} "
            "iterations for the schedule that begins after the warm-up (SOLVER.RESCALE_INTERVAL); "
            "lower it, or train longer"
        )
    return notes


def common_rows(cfg: CfgNode, world_size: int) -> list[tuple[str, str]]:
    """What every run's table of the effective recipe says."""
    solver, model, batch = cfg.SOLVER, cfg.MODEL, cfg.SOLVER.IMS_PER_BATCH
    precision = f"mixed, {solver.AMP.PRECISION}" if solver.AMP.ENABLED else "float32"
    in_parts = f", in {solver.ACCUMULATE} parts" if solver.ACCUMULATE > 1 else ""
    schedule = solver.LR_SCHEDULER_NAME
    if schedule == "WarmupMultiStepLR":
        schedule += f", x{solver.GAMMA:g} at {list(solver.STEPS)}"
    if solver.WARMUP_ITERS:
        schedule += f", {solver.WARMUP_ITERS} warm-up iterations"
    return [
        ("data", ", ".join(cfg.DATASETS.TRAIN)),
        ("batch", f"{batch} = {world_size} process(es) x {batch // world_size}{in_parts}"),
        ("iterations", str(solver.MAX_ITER)),
        (
            "lr",
            f"{solver.BASE_LR:g}, weight decay {solver.WEIGHT_DECAY:g} "
            f"(norms {solver.WEIGHT_DECAY_NORM:g})",
        ),
        ("schedule", schedule),
        ("backbone", backbone_title(cfg)),
        ("input", f"{cfg.INPUT.FORMAT}, mean {model.PIXEL_MEAN}, std {model.PIXEL_STD}"),
        ("weights", model.WEIGHTS or "none: random initialisation"),
        ("hardware", f"{model.DEVICE}, {precision}"),
        ("seed", str(cfg.SEED)),
    ]


def image_rows(cfg: CfgNode, num_images: int) -> list[tuple[str, str]]:
    """What the table says besides of training on a stream of single images."""
    epochs = cfg.SOLVER.MAX_ITER * cfg.SOLVER.IMS_PER_BATCH / num_images
    return [
        ("epochs", f"{epochs:.2f} of {num_images} images"),
        ("optimizer", cfg.SOLVER.OPTIMIZER),
    ]


def pretrain_rows(cfg: CfgNode, num_images: int) -> list[tuple[str, str]]:
    """What the table says of a MoCo run besides."""
    moco, views = cfg.MODEL.MOCO, cfg.INPUT.VIEWS
    head = moco.HEAD if moco.HEAD == "linear" else f"{moco.HEAD} of {moco.HEAD_LAYERS} layers"
    in_batch = cfg.MODEL.META_ARCHITECTURE == "MoCoV3"
    return [
        ("views", f"{views.SIZE} px, query {views.QUERY}, key {views.KEY}"),
        ("head", f"{head}, {moco.DIM} dimensions"),
        *(batch_key_rows(cfg) if in_batch else dictionary_rows(cfg, num_images)),
    ]


def transfer_rows(cfg: CfgNode) -> list[tuple[str, str]]:
    """What the table says of a detector or a semantic segmentor besides."""
    model, few, crop = cfg.MODEL, cfg.DATASETS.FEW_LABELS, cfg.INPUT.SEM_SEG
    part = f"{few:.4g} of the images" if few < 1 else f"{few:g} images"
    labels = f"of {part}, drawn by the seed" if few else "of all images"
    rows = [
        ("labels", labels),
        ("optimizer", cfg.SOLVER.OPTIMIZER),
        ("test", ", ".join(cfg.DATASETS.TEST)),
    ]
    if model.META_ARCHITECTURE == "SemanticSegmentor":
        head = model.SEM_SEG_HEAD
        rows += [
            ("model", f"{model.META_ARCHITECTURE}, {head.NAME}"),
            ("head norm", head.NORM or "none"),
        ]
    else:
        rows += [
            ("model", f"{model.META_ARCHITECTURE}, {model.ROI_HEADS.NAME}"),
            ("FPN norm", model.FPN.NORM or "none"),
        ]
    if crop.CROP_SIZE:
        low, high = crop.SCALE
        rows.append(("crops", f"{crop.CROP_SIZE} px of pictures scaled by {low:g} to {high:g}"))
    if is_vit(cfg):
        decay = cfg.SOLVER.LAYER_DECAY
        return [*rows, ("lr of a block", f"{decay:g} of the next" if decay != 1 else "the same")]
    return [
        *rows,
        ("frozen", f"up to stage {model.BACKBONE.FREEZE_AT}"),
        ("stride in 1x1", str(model.RESNETS.STRIDE_IN_1X1)),
    ]


def recipe_table(rows: list[tuple[str, str]], notes: list[str]) -> str:
    """The recipe that runs as text, with a line per automatic choice and warning."""
    return tabulate(
        [*rows, *(("note", note) for note in notes)], ("effective recipe", ""), tablefmt="simple"
    )
