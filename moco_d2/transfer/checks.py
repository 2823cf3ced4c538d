"""What of a planned benchmark cannot work, found out before it begins."""

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.utils.file_io import PathManager
from torch import nn

from moco_d2.checkpoint import WeightsError, load_detector_weights_
from moco_d2.data.few_labels import few_images
from moco_d2.engine.setup import sentence
from moco_d2.engine.transfer import TransferTrainer
from moco_d2.errors import UserError
from moco_d2.transfer.cells import DONE
from moco_d2.transfer.plan import Plan, Task


def check(plan: Plan, at_once: int) -> dict[str, str]:
    """Add to `plan.problems` what is wrong with data sets, weights and disk.

    Every data set is read, and of each some images are looked for; every task's model is built on
    the CPU, and every initialisation loaded into it.

    Args:
        at_once: runs at the same time.

    Returns:
        sizes of things, in words: "NAME": images of a data set; "disk": needed and free.
    """
    sizes: dict[str, str] = {}
    needed = 0
    for task in plan.tasks:
        cfg = plan.config(task)
        if cfg is None:
            continue
        names = dict.fromkeys((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))
        images = {name: _attempt(plan, dataset_size, name) for name in names}
        sizes |= {name: f"{count} images" for name, count in images.items()}
        training = [images[name] for name in cfg.DATASETS.TRAIN]
        if None not in training:
            _attempt(plan, few_images, sum(training), cfg.DATASETS.FEW_LABELS, 0)
        model = _attempt(plan, _build, cfg)
        if model is not None:
            needed += _checkpoints_bytes(plan, task, cfg, model, at_once)
            _check_weights(plan, task, model)
    free = shutil.disk_usage(_existing(plan.root)).free
    sizes["disk"] = f"{needed / 1e9:.1f} GB for checkpoints, {free / 1e9:.1f} GB free"
    if needed > free:
        plan.problems.append(
            f"{plan.root} has room for {free / 1e9:.1f} GB, and the checkpoints need some "
            f"{needed / 1e9:.1f} GB: make room, or name another --output"
        )
    return sizes


@functools.lru_cache(maxsize=64)
def dataset_size(name: str) -> int:
    """Images of a registered data set.

    Raises:
        UserError: it, or one of the images that were looked for, is not there.
    """
    try:
        samples = DatasetCatalog.get(name)
    except FileNotFoundError as error:
        if error.filename is None:  # has said it in a sentence
            raise
        raise UserError(_absent(name, error.filename)) from error
    except ImportError as error:
        raise UserError(f"data set {name!r} cannot be read: {error}") from error
    for sample in (samples[0], samples[len(samples) // 2], samples[-1]) if samples else ():
        if not PathManager.isfile(sample["file_name"]):
            raise UserError(_absent(name, sample["file_name"]))
    if not samples:
        raise UserError(f"data set {name!r} is empty")
    return len(samples)


def _absent(name: str, path: str) -> str:
    root = os.getenv("DETECTRON2_DATASETS", "datasets")
    return (
        f"data set {name!r}: {path} is not there; detectron2 looks for its data sets in "
        f"$DETECTRON2_DATASETS, now {root}"
    )


def _attempt(plan: Plan, function: Callable, *args):
    """The function's result; None, and one more problem, if it refuses."""
    try:
        return function(*args)
    except (ValueError, KeyError, AssertionError, OSError) as error:
        plan.problems.append(sentence(error))
        return None


def _build(cfg: CfgNode) -> nn.Module:
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    return TransferTrainer.build_model(cfg)


def _check_weights(plan: Plan, task: Task, model: nn.Module) -> None:
    for init in plan.inits:
        if init.weights and plan.configs[task.name, init.name] is not None:
            try:
                load_detector_weights_(model, init.weights)
            except WeightsError as error:
                plan.problems.append(f"{task.name} from {init.name}: {error}")


def _checkpoints_bytes(plan: Plan, task: Task, cfg: CfgNode, model: nn.Module, at_once: int) -> int:
    """The last checkpoint of each run, and of those that run at once the one before besides."""
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    # SGD keeps one number per parameter, AdamW two.
    one = weights * (3 if cfg.SOLVER.OPTIMIZER == "ADAMW" else 2)
    left = [cell for cell in plan.cells if cell.group == task.name and cell.status != DONE]
    return (len(left) + min(at_once, len(left))) * one


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
