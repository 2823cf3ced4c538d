"""Whether a run kept to the protocol of a published number: its config against the task's own."""

import math
from functools import cache
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode, get_cfg

from moco_d2.config import add_moco_config
from moco_d2.engine.configs import flattened
from moco_d2.transfer.cells import REPOSITORY
from moco_d2.transfer.published import published_results

# Sections and keys that do not change what is learned from which images, or only as the
# initialisation or the hardware demands.
_FREE = (
    "OUTPUT_DIR",
    "SEED",
    "VERSION",
    "CUDNN_BENCHMARK",
    "VIS_PERIOD",
    "LOG_PERIOD",
    "DATALOADER.NUM_WORKERS",
    "DATALOADER.CACHE",
    "DATALOADER.CACHE_GB",
    "MODEL.CHANNELS_LAST",
    "MODEL.COMPILE",
    "MODEL.DEVICE",
    "MODEL.WEIGHTS",
    "SOLVER.CHECKPOINT_ARCHIVE_PERIOD",
    "SOLVER.CHECKPOINT_KEEP",
    "SOLVER.CHECKPOINT_PERIOD",
    "TEST.EVAL_PERIOD",
    "TEST.EXPECTED_RESULTS",
    # Come with the weights; moco_d2.checkpoint sees to it that they are the right ones.
    "INPUT.FORMAT",
    "INPUT.FOLLOW_WEIGHTS",
    "MODEL.PIXEL_MEAN",
    "MODEL.PIXEL_STD",
    "MODEL.RESNETS.STRIDE_IN_1X1",
    # Compared per image instead: linear scaling keeps all of them.
    "SOLVER.REFERENCE_WORLD_SIZE",
    "SOLVER.BASE_LR",
    "SOLVER.MAX_ITER",
    "SOLVER.STEPS",
    "SOLVER.WARMUP_ITERS",
    "TEST.PRECISE_BN.NUM_ITER",
)
# What SyncBN may have become on the hardware: see moco_d2.engine.norm.
_SYNCHRONISED = ("SyncBN", "nnSyncBN", "naiveSyncBN", "BN")

# How much a number may differ, as a share of the larger one.
_TOLERANCES = {
    # Batch norm sees them. The paper's authors halve them (facebookresearch/moco#11), no more.
    "SOLVER.IMS_PER_BATCH": 0.5,
    # Few iterations, which scaling rounds.
    "images of warm-up": 0.05,
    "images of precise BN": 0.05,
}


def departures(task: str, cfg: CfgNode) -> list[str]:
    """Where a run differs from the protocol that the published numbers of its task belong to.

    Learning rate and schedule may be scaled linearly, for at least half and at most twice the
    images per batch.

    Args:
        task: name of a config in configs/transfer.
        cfg: of the run.

    Returns:
        a phrase for each difference. Empty: the run may be held against the published numbers.
    """
    published = published_results().tasks.get(task)
    if published is None:
        return ["nothing is published for this task"]
    if published.not_comparable:
        return [published.not_comparable]
    path = REPOSITORY / f"configs/transfer/{task}.yaml"
    if not path.is_file():
        return [f"there is no configs/transfer/{task}.yaml to compare with"]
    there, here = _published_facts(path), _facts(cfg)
    return [
        f"{key} is {_short(here.get(key))}, not {_short(there.get(key))}"
        for key in sorted(there.keys() | here.keys())
        if not _same(here.get(key), there.get(key), _TOLERANCES.get(key, 0.001))
    ]


def load_config(path: str | Path) -> CfgNode:
    """A config file on top of the defaults; a run's config.yaml too."""
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.set_new_allowed(True)  # a run's own architecture may have brought its own keys
    cfg.merge_from_file(str(path))
    return cfg


@cache
def _published_facts(path: Path) -> dict[str, Any]:
    return _facts(load_config(path))


def _facts(cfg: CfgNode) -> dict[str, Any]:
    """What must be equal: most keys, and the schedule in images instead of iterations."""
    solver = cfg.SOLVER
    facts = {k: _comparable(k, v) for k, v in flattened(cfg).items() if k not in _FREE}
    batch = solver.IMS_PER_BATCH
    facts["images seen"] = solver.MAX_ITER * batch
    facts["learning rate per image"] = solver.BASE_LR / batch
    facts["images before the learning rate drops"] = [step * batch for step in solver.STEPS]
    facts["images of warm-up"] = solver.WARMUP_ITERS * batch
    facts["images of precise BN"] = cfg.TEST.PRECISE_BN.NUM_ITER * batch
    return facts


def _comparable(key: str, value: Any) -> Any:
    if key.endswith(".NORM") and value in _SYNCHRONISED:
        return "SyncBN"
    return _as_lists(value)


def _as_lists(value: Any) -> Any:
    """YAML makes lists of tuples."""
    return [_as_lists(v) for v in value] if isinstance(value, (tuple, list)) else value


def _same(here: Any, there: Any, tolerance: float) -> bool:
    if isinstance(here, list) and isinstance(there, list):
        pairs = zip(here, there, strict=False)
        return len(here) == len(there) and all(_same(a, b, tolerance) for a, b in pairs)
    if isinstance(here, (int, float)) and isinstance(there, (int, float)):
        return math.isclose(here, there, rel_tol=tolerance)
    return here == there


def _short(value: Any, length: int = 50) -> str:
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}…"
