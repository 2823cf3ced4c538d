"""Cityscapes' official scores of instances and of semantic maps.

detectron2 has evaluators for both, but those of its main branch import a package that is not
public, and they need all predictions on one machine. Here every process compares its own images
with the truth, by the functions of the public `cityscapesscripts`, and only counts are gathered.
"""

import copy
import logging
import tempfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm

from moco_d2.evaluation.old_numpy import former_numpy_names

logger = logging.getLogger(__name__)

_IMAGE_SUFFIX = "_leftImg8bit"


class _CityscapesEvaluator(DatasetEvaluator):
    """What both tasks share.

    The metadata must have `gt_dir`, the folder of a split in gtFine.
    """

    def __init__(self, dataset_name: str):
        self._metadata = MetadataCatalog.get(dataset_name)

    def process(self, inputs, outputs):
        for image, output in zip(inputs, outputs, strict=True):
            with tempfile.TemporaryDirectory() as folder, former_numpy_names():
                self._compare(image["file_name"], output, Path(folder).resolve())

    def _truth(self, image: str, kind: str) -> str:
        """The PNG with the truth of an image; cityscapesscripts ends the program without it."""
        path = Path(image)
        name = f"{path.stem.removesuffix(_IMAGE_SUFFIX)}_gtFine_{kind}.png"
        truth = Path(self._metadata.gt_dir, path.parent.name, name).absolute()
        if not truth.exists():
            raise FileNotFoundError(f"the truth of {image} is not there: {truth}")
        return str(truth)


def _quiet(module) -> Any:
    """A copy of the options of a script of cityscapesscripts, with which it writes no report."""
    options = copy.copy(module.args)
    options.quiet, options.JSONOutput, options.colorized = True, False, False
    return options


class CityscapesInstances(_CityscapesEvaluator):
    """AP and AP50 of masks, averaged over the classes with instances, as `segm`.

    Takes `instances` with `pred_masks`, `pred_classes` (indices of `thing_classes`) and `scores`.
    """

    def __init__(self, dataset_name: str):
        import cityscapesscripts.evaluation.evalInstanceLevelSemanticLabeling as official

        super().__init__(dataset_name)
        self._official, self._options = official, _quiet(official)
        official.setInstanceLabels(self._options)

    def reset(self):
        self._matches = {}  # by file of the truth: its instances and those predicted

    def _compare(self, image, output, folder):
        official, truth = self._official, self._truth(image, "instanceIds")
        instances = output["instances"].to("cpu")
        lines = []
        for i in range(len(instances)):
            cv2.imwrite(f"{folder}/{i}.png", instances.pred_masks[i].numpy().astype(np.uint8))
            name = self._metadata.thing_classes[instances.pred_classes[i]]
            lines.append(f"{i}.png {official.name2label[name].id} {instances.scores[i]:.9g}\n")
        predictions = folder / "predictions.txt"
        predictions.write_text("".join(lines))
        options = copy.copy(self._options)
        options.predictionPath = str(folder)
        self._matches |= official.matchGtWithPreds(
            [str(predictions)], [truth], official.instances2dict([truth]), options
        )

    def evaluate(self):
        gathered = comm.gather(self._matches, dst=0)
        if not comm.is_main_process():
            return None
        matches = {truth: match for part in gathered for truth, match in part.items()}
        if not matches:
            return {}
        with former_numpy_names():
            precisions = self._official.evaluateMatches(matches, self._options)
            averages = self._official.computeAverages(precisions, self._options)
        scores = {"AP": averages["allAp"], "AP50": averages["allAp50%"]}
        for name, values in averages["classes"].items():
            scores[f"AP-{name}"] = values["ap"]
        return _percent("segm", scores)


class CityscapesSemantics(_CityscapesEvaluator):
    """Mean IoU over classes (`mIoU`) and categories (`IoU_sup`), as `sem_seg`.

    `iIoU` and `iIoU_sup` weight pixels of an instance by its size. Takes `sem_seg`, scores
    (classes, H, W) in the order of Cityscapes' trainIds.
    """

    def __init__(self, dataset_name: str):
        import cityscapesscripts.evaluation.evalPixelLevelSemanticLabeling as official

        super().__init__(dataset_name)
        self._official, self._options = official, _quiet(official)
        labels = [label for label in official.labels if not label.ignoreInEval]
        self._ids = torch.tensor([label.id for label in sorted(labels, key=lambda x: x.trainId)])

    def reset(self):
        self._confusion = self._official.generateMatrix(self._options)  # also fills evalLabels
        self._instances = self._official.generateInstanceStats(self._options)

    def _compare(self, image, output, folder):
        truth, prediction = self._truth(image, "labelIds"), f"{folder}/prediction.png"
        self._truth(image, "instanceIds")
        ids = self._ids[output["sem_seg"].argmax(dim=0).cpu()]
        cv2.imwrite(prediction, ids.numpy().astype(np.uint8))
        self._official.evaluatePair(
            prediction, truth, self._confusion, self._instances, {}, self._options
        )

    def evaluate(self):
        gathered = comm.gather((self._confusion, self._instances), dst=0)
        if not comm.is_main_process():
            return None
        confusion, instances = gathered[0][0].copy(), copy.deepcopy(gathered[0][1])
        for more_confusion, more_instances in gathered[1:]:
            confusion += more_confusion
            _add_(instances, more_instances)
        official, options = self._official, self._options
        labels, categories = options.evalLabels, official.category2labels
        classes = {i: official.getIouScoreForLabel(i, confusion, options) for i in labels}
        averaged = {
            "mIoU": classes,
            "iIoU": {
                i: official.getInstanceIouScoreForLabel(i, confusion, instances, options)
                for i in labels
            },
            "IoU_sup": {
                c: official.getIouScoreForCategory(c, confusion, options) for c in categories
            },
            "iIoU_sup": {
                c: official.getInstanceIouScoreForCategory(c, confusion, instances, options)
                for c in categories
            },
        }
        scores = {
            key: official.getScoreAverage(values, options) for key, values in averaged.items()
        }
        for i in self._ids.tolist():
            scores[f"IoU-{official.id2label[i].name}"] = classes[i]
        return _percent("sem_seg", scores)


def _add_(total: dict, more: dict) -> None:
    """Add the numbers in nested dicts; other values, e.g. lists of label ids, are the same."""
    for key, value in more.items():
        if isinstance(value, dict):
            _add_(total[key], value)
        elif isinstance(value, float):
            total[key] += value


def _percent(task: str, scores: dict[str, float]) -> dict[str, dict[str, float]]:
    results = {task: {name: 100 * float(value) for name, value in scores.items()}}
    logger.info(results)
    return results
