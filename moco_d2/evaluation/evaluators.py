"""Which evaluator judges predictions on a data set, by the `evaluator_type` of its metadata."""

import importlib.util
import math
from collections.abc import Callable, Iterable

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import (
    COCOEvaluator,
    DatasetEvaluator,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
    SemSegEvaluator,
)

from moco_d2.engine.densepose import densepose_evaluator
from moco_d2.errors import UserError
from moco_d2.evaluation.cityscapes import CityscapesInstances, CityscapesSemantics
from moco_d2.evaluation.old_numpy import former_numpy_names


def _coco(cfg: CfgNode, name: str, folder: str) -> DatasetEvaluator:
    sigmas = cfg.TEST.KEYPOINT_OKS_SIGMAS
    return COCOEvaluator(name, output_dir=folder, kpt_oks_sigmas=sigmas)


class LVISOnAnyNumPy(LVISEvaluator):
    """detectron2's evaluator; a score without any class to average over is NaN, not -100."""

    def evaluate(self):
        with former_numpy_names():
            results = super().evaluate()
        for scores in (results or {}).values():
            scores.update({name: math.nan for name, score in scores.items() if score < 0})
        return results


def _lvis(cfg: CfgNode, name: str, folder: str) -> DatasetEvaluator:
    # Named, since without a single prediction there is nothing to tell the tasks from.
    tasks = ("bbox", "segm") if cfg.MODEL.MASK_ON else ("bbox",)
    return LVISOnAnyNumPy(name, tasks, output_dir=folder)


def _pascal_voc(cfg: CfgNode, name: str, folder: str) -> DatasetEvaluator:
    return PascalVOCDetectionEvaluator(name)


def _sem_seg(cfg: CfgNode, name: str, folder: str) -> DatasetEvaluator:
    return SemSegEvaluator(name, output_dir=folder)


def _cityscapes_instance(cfg: CfgNode, name: str, folder: str) -> DatasetEvaluator:
    return CityscapesInstances(name)


def _cityscapes_sem_seg(cfg: CfgNode, name: str, folder: str) -> DatasetEvaluator:
    return CityscapesSemantics(name)


# `evaluator_type` of a data set's metadata -> what evaluates it:
# (config, name of the data set, folder for results) -> evaluator.
EVALUATORS: dict[str, Callable[[CfgNode, str, str], DatasetEvaluator]] = {
    "coco": _coco,
    "densepose": densepose_evaluator,
    "lvis": _lvis,
    "pascal_voc": _pascal_voc,
    "sem_seg": _sem_seg,
    "cityscapes_instance": _cityscapes_instance,
    "cityscapes_sem_seg": _cityscapes_sem_seg,
}

# Packages that reading or evaluating data sets imports: by their type, and for some by the
# beginning of their name.
_PACKAGES_BY_TYPE = {
    "lvis": "lvis",
    "cityscapes_instance": "cityscapesscripts",
    "cityscapes_sem_seg": "cityscapesscripts",
}
_PACKAGES_BY_NAME = {"cityscapes_fine_instance_seg": "shapely"}


def evaluator_type(name: str) -> str:
    """The key of `EVALUATORS` for a data set.

    Raises:
        ValueError: it is not registered, or does not say how it is evaluated.
    """
    if name not in DatasetCatalog.list():
        raise UserError(f"DATASETS.TEST names {name!r}, which is not a registered data set")
    kind = MetadataCatalog.get(name).get("evaluator_type")
    if kind not in EVALUATORS:
        problem = "has no evaluator_type" if kind is None else f"has evaluator_type {kind!r}"
        raise UserError(
            f"data set {name!r} {problem}, and it must be one of {', '.join(EVALUATORS)}; set "
            f"MetadataCatalog.get({name!r}).evaluator_type where you register it"
        )
    return kind


def check_packages(names: Iterable[str]) -> None:
    """Find out now, not after the training, whether data sets need a package that is missing.

    Args:
        names: of data sets; those without an `evaluator_type` need none.

    Raises:
        ValueError: one is missing.
    """
    for name in names:
        kind = MetadataCatalog.get(name).get("evaluator_type")
        needed = [_PACKAGES_BY_TYPE[kind]] if kind in _PACKAGES_BY_TYPE else []
        needed += [p for prefix, p in _PACKAGES_BY_NAME.items() if name.startswith(prefix)]
        for package in needed:
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"data set {name!r} needs the package {package}, which is not installed: "
                    f"pip install {package}"
                )
