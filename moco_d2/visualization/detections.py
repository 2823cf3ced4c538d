"""Detections of several detectors on the same images, beside the ground truth."""

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import DefaultPredictor
from detectron2.structures import Instances
from detectron2.utils.visualizer import ColorMode, Visualizer

_LABEL_HEIGHT = 24


def draw_detections(
    detectors: dict[str, CfgNode],
    dataset: str,
    path: str,
    *,
    images: int = 6,
    threshold: float = 0.3,
    scale: float = 2.0,
) -> None:
    """Write a picture with a row per detector and a column per image; ground truth comes first.

    Args:
        detectors: title -> config whose MODEL.WEIGHTS is a trained detector.
        dataset: registered detection set; its first images are shown.
        path: of the PNG.
        threshold: lowest score of a box that is drawn.
        scale: magnification.
    """
    samples = DatasetCatalog.get(dataset)[:images]
    metadata = MetadataCatalog.get(dataset)
    pictures = [cv2.imread(sample["file_name"]) for sample in samples]

    def visualizer(picture: np.ndarray) -> Visualizer:
        return Visualizer(picture[..., ::-1], metadata, scale, ColorMode.IMAGE)

    truth = [
        visualizer(picture).draw_dataset_dict({"annotations": _boxes_only(sample)})
        for picture, sample in zip(pictures, samples, strict=True)
    ]
    rows = [_row("ground truth", truth)]
    for title, cfg in detectors.items():
        predictor = DefaultPredictor(cfg)
        drawn = []
        for picture in pictures:
            found = predictor(picture)["instances"].to("cpu")
            drawn.append(visualizer(picture).draw_instance_predictions(_above(found, threshold)))
        rows.append(_row(f"{title} (score above {threshold:g})", drawn))
    cv2.imwrite(path, np.vstack(rows))


def _boxes_only(sample: dict) -> list[dict]:
    """Annotations without masks and keypoints, which a box detector cannot find."""
    kept = ("bbox", "bbox_mode", "category_id")
    return [{key: annotation[key] for key in kept} for annotation in sample["annotations"]]


def _above(instances: Instances, threshold: float) -> Instances:
    return instances[torch.nonzero(instances.scores > threshold)[:, 0]]


def _row(title: str, drawn: list) -> np.ndarray:
    row = np.hstack([image.get_image()[..., ::-1] for image in drawn])
    label = np.full((_LABEL_HEIGHT, row.shape[1], 3), 255, np.uint8)
    cv2.putText(label, title, (6, 17), cv2.FONT_HERSHEY_SIMPLEX, 0.55, (0, 0, 0), 1, cv2.LINE_AA)
    return np.vstack([label, row])
