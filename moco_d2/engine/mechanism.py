"""What a config says of its dictionary (`MODEL.MOCO.DICTIONARY`): checked, completed, described."""

import math

from detectron2.config import CfgNode

from moco_d2.engine.backbones import has_batch_norm
from moco_d2.engine.memory import total_memory
from moco_d2.errors import UserError

# Share of the data set's keys that a queue may hold; beyond, one in eight holds an older key of the
# query's own image (docs/monitoring.md).
_SANE_SHARE = 0.5


def check_dictionary(cfg: CfgNode, num_images: int) -> list[str]:
    """Refuse a dictionary that does not go with the rest of the config, the data or the machine.

    Args:
        num_images: size of the data set.

    Returns:
        warnings of what runs but is known to go wrong.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    moco = cfg.MODEL.MOCO
    if moco.DICTIONARY not in _CHECKS:
        raise UserError(
            f"MODEL.MOCO.DICTIONARY is {moco.DICTIONARY!r}; known: {', '.join(_CHECKS)}"
        )
    if moco.DICTIONARY != "in_batch" and moco.QUEUE_SIZE < 1:
        raise UserError(f"MODEL.MOCO.QUEUE_SIZE is {moco.QUEUE_SIZE}; it must be at least 1")
    return _CHECKS[moco.DICTIONARY](cfg, num_images)


def _check_queue(cfg: CfgNode, num_images: int) -> list[str]:
    size, per_image = cfg.MODEL.MOCO.QUEUE_SIZE, directions(cfg)
    images = f"{num_images} images" + (" with two keys each" if per_image == 2 else "")
    if size > num_images * per_image:
        seen = f"exceeds the {images}"
    elif size > _SANE_SHARE * num_images * per_image:
        seen = f"is more than half of the {images}"
    else:
        return leaks(cfg)
    return [
        *leaks(cfg),
        f"MODEL.MOCO.QUEUE_SIZE {size} {seen}: the dictionary then holds older keys of the query's "
        f"own image as negatives; a sixth, {num_images * per_image // 6}, or less is sound",
    ]


def _check_memory_bank(cfg: CfgNode, num_images: int) -> list[str]:
    moco = cfg.MODEL.MOCO
    if moco.SYMMETRIC:
        raise UserError(
            "MODEL.MOCO.SYMMETRIC True has no meaning with MODEL.MOCO.DICTIONARY memory_bank, "
            "which encodes no keys that could change places with queries; set one of the two back"
        )
    if not 0.0 <= moco.BANK_MOMENTUM < 1.0:
        raise UserError(f"MODEL.MOCO.BANK_MOMENTUM is {moco.BANK_MOMENTUM}; it must lie in [0, 1)")
    if moco.BANK_SIZE not in (0, num_images):
        raise UserError(
            f"MODEL.MOCO.BANK_SIZE is {moco.BANK_SIZE}, and DATASETS.TRAIN has {num_images} "
            "images; leave it at 0, which takes their number"
        )
    if num_images < moco.QUEUE_SIZE:
        raise UserError(
            f"MODEL.MOCO.QUEUE_SIZE {moco.QUEUE_SIZE} exceeds the {num_images} images that the "
            f"memory bank has negatives of; set it to {num_images} or less"
        )
    needed = _bank_bytes(cfg, num_images)
    there = total_memory(cfg.MODEL.DEVICE)
    if needed > there:
        on_gpu = cfg.MODEL.DEVICE.startswith("cuda")
        where = "on each GPU" if on_gpu else "in each process's share of the memory"
        raise UserError(
            f"a memory bank of {num_images} images takes {needed / 1e9:.2f} GB {where} "
            f"({moco.DIM} numbers of 4 bytes for each, MODEL.MOCO.DIM), which has "
            f"{there / 1e9:.2f} GB; lower MODEL.MOCO.DIM, train on fewer images, or set "
            "MODEL.MOCO.DICTIONARY to queue, which does not grow with the data"
        )
    return []  # the positive comes from another batch: BN statistics tell nothing of it (Sec. 3.3)


def _check_in_batch(cfg: CfgNode, num_images: int) -> list[str]:
    parts = cfg.SOLVER.ACCUMULATE
    if parts > 1:
        raise UserError(
            f"SOLVER.ACCUMULATE {parts} cannot divide a step of MODEL.MOCO.DICTIONARY in_batch, "
            "whose gradients flow through the keys of the whole batch; set it to 1"
        )
    return [*leaks(cfg), *_check_negatives(cfg, num_images)]


_CHECKS = {
    "queue": _check_queue,
    "memory_bank": _check_memory_bank,
    "in_batch": _check_in_batch,
}


def check_batch_keys(cfg: CfgNode, num_images: int) -> list[str]:
    """The same for MoCo v3, which has no dictionary."""
    moco = cfg.MODEL.MOCO
    for key, default in (("DICTIONARY", "queue"), ("SYMMETRIC", False)):
        if moco[key] != default:
            raise UserError(
                f"MODEL.MOCO.{key} {moco[key]} is for MODEL.META_ARCHITECTURE MoCo; MoCoV3 "
                "compares both views with the keys of the batch, always; set it back to "
                f"{default}"
            )
    return _check_negatives(cfg, num_images)


def _check_negatives(cfg: CfgNode, num_images: int) -> list[str]:
    """Warnings where the keys of a batch are its negatives; one image has none."""
    batch = cfg.SOLVER.IMS_PER_BATCH
    if batch < 2:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {batch} leaves a query no negatives, which are the other images "
            "of the batch here; give 2 or more"
        )
    if num_images >= batch:
        return []
    return [
        f"SOLVER.IMS_PER_BATCH {batch} exceeds the {num_images} images: a batch then holds an "
        "image twice, as a negative of its own"
    ]


def leaks(cfg: CfgNode) -> list[str]:
    """Warnings that BN statistics give away which key belongs to a query; for MoCo whose keys come
    from an encoder."""
    batch, group = cfg.SOLVER.IMS_PER_BATCH, cfg.MODEL.BN_GROUP_SIZE
    if not has_batch_norm(cfg):
        return []
    if not cfg.MODEL.MOCO.SHUFFLE_BN:
        return [
            "MODEL.MOCO.SHUFFLE_BN is off: BN statistics tell a query which key shares its "
            "group, and the loss can be solved without learning to see"
        ]
    if group in (0, batch):
        return [
            f"one BN group of all {batch} images: queries and keys share their statistics, so "
            "shuffling hides nothing; use a MODEL.BN_GROUP_SIZE below the batch"
        ]
    return []


def resolve_bank_size(cfg: CfgNode, num_images: int) -> list[str]:
    """Set MODEL.MOCO.BANK_SIZE of a memory bank, in place; returns a note when that changed it."""
    moco = cfg.MODEL.MOCO
    if moco.DICTIONARY != "memory_bank" or num_images == moco.BANK_SIZE:
        return []
    moco.BANK_SIZE = num_images
    return [f"MODEL.MOCO.BANK_SIZE 0 -> {num_images}, the images of DATASETS.TRAIN"]


def dictionary_rows(cfg: CfgNode, num_images: int) -> list[tuple[str, str]]:
    """What the table of the effective recipe says of groups, dictionary, key encoder and loss."""
    moco, batch = cfg.MODEL.MOCO, cfg.SOLVER.IMS_PER_BATCH
    size, shuffled = moco.QUEUE_SIZE, f"keys {'' if moco.SHUFFLE_BN else 'not '}shuffled"
    chance = f"log(K + 1) = {math.log(size + 1):.3f}"
    if moco.DICTIONARY == "queue":
        steps, epochs = (size / directions(cfg) / n for n in (batch, num_images))
        dictionary = f"queue of {size} keys = {steps:.1f} steps = {epochs:.2f} epochs"
        key_encoder = f"momentum {moco.MOMENTUM:g}, {moco.MOMENTUM_SCHEDULE}"
    elif moco.DICTIONARY == "memory_bank":
        dictionary = (
            f"memory bank of {num_images} images ({_bank_bytes(cfg, num_images) / 1e9:.2g} GB), "
            f"momentum {moco.BANK_MOMENTUM:g}, {size} negatives drawn a step"
        )
        key_encoder, shuffled = "none", "no keys to shuffle"
    else:
        dictionary = f"the {batch} keys of the batch, with gradient"
        key_encoder = "the query encoder"
        chance = f"log(batch) = {math.log(batch):.3f}"
    group = cfg.MODEL.BN_GROUP_SIZE or batch
    groups = f"{batch // group} of {group} images, {shuffled}"
    both = "mean of both directions, " if moco.SYMMETRIC else ""
    return [
        ("BN groups", groups if has_batch_norm(cfg) else "none: no batch norm"),
        ("dictionary", dictionary),
        ("key encoder", key_encoder),
        ("loss", f"{both}temperature {moco.TEMPERATURE:g}, chance level {chance}"),
    ]


def batch_key_rows(cfg: CfgNode) -> list[tuple[str, str]]:
    """The same for MoCo v3."""
    moco, batch = cfg.MODEL.MOCO, cfg.SOLVER.IMS_PER_BATCH
    group = cfg.MODEL.BN_GROUP_SIZE or batch
    chance = 4 * moco.TEMPERATURE * math.log(batch)
    return [
        ("BN groups", f"{batch // group} of {group} images"),
        ("predictor", f"2 layers, {'a' if moco.PREDICTOR_LAST_NORM else 'no'} norm at the end"),
        ("dictionary", f"none: the {batch} keys of each view of the batch"),
        ("key encoder", f"momentum {moco.MOMENTUM:g}, {moco.MOMENTUM_SCHEDULE}"),
        (
            "loss",
            f"sum of both directions, temperature {moco.TEMPERATURE:g}, chance level "
            f"4 tau log(batch) = {chance:.3f}",
        ),
    ]


def directions(cfg: CfgNode) -> int:
    """How often an image is a query in a step."""
    return 2 if cfg.MODEL.MOCO.SYMMETRIC else 1


def _bank_bytes(cfg: CfgNode, num_images: int) -> int:
    return num_images * cfg.MODEL.MOCO.DIM * 4
