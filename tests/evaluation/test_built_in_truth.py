"""The truth of the built-in sets, fed as predictions, scores 100 in each layout's evaluator."""

import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.structures import Boxes, BoxMode, Instances, polygons_to_bitmask
from PIL import Image

from moco_d2 import add_moco_config
from moco_d2.data.synthetic import render_demo_data
from moco_d2.data.synthetic.sets import SETS
from moco_d2.engine.transfer import TransferTrainer

LAYOUTS = ("voc", "lvis", "cityscapes")
IMAGES = 8


@pytest.fixture(scope="module")
def datasets_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    sizes = dict.fromkeys(SETS, 0) | {"scenes_test": IMAGES}
    for layout in LAYOUTS:
        render_demo_data(str(folder / "moco_demo"), layout, sizes, workers=1)
    return folder


def score(name, output_of, folder):
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.MODEL.MASK_ON, cfg.OUTPUT_DIR = True, str(folder)
    evaluator = TransferTrainer.build_evaluator(cfg, name)
    evaluator.reset()
    records = DatasetCatalog.get(name)
    assert len(records) == IMAGES
    for record in records:
        evaluator.process([record], [output_of(record)])
    return evaluator.evaluate()


def annotated(record):
    """Instances as the dict has them."""
    found, size = record["annotations"], (record["height"], record["width"])
    instances = Instances(size)
    boxes = [BoxMode.convert(a["bbox"], a["bbox_mode"], BoxMode.XYXY_ABS) for a in found]
    instances.pred_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32))
    instances.pred_classes = torch.tensor([a["category_id"] for a in found])
    instances.scores = torch.ones(len(found))
    if "segmentation" in found[0]:
        masks = [polygons_to_bitmask(a["segmentation"], *size) for a in found]
        instances.pred_masks = torch.from_numpy(np.array(masks))
    return {"instances": instances}


def painted(record):
    """Instances as Cityscapes' PNG has them; the contours in the dict are half a pixel inside."""
    file = record["file_name"].replace("leftImg8bit.png", "gtFine_instanceIds.png")
    ids = np.array(Image.open(file.replace("leftImg8bit", "gtFine")))
    things = np.unique(ids[ids >= 1000])
    classes = [24, 25, 26, 27, 28, 31, 32, 33]  # Cityscapes' ids in the order of thing_classes
    instances = Instances(ids.shape)
    instances.pred_masks = torch.from_numpy(ids == things[:, None, None])
    instances.pred_classes = torch.tensor([classes.index(i // 1000) for i in things])
    instances.scores = torch.ones(len(things))
    return {"instances": instances}


def semantic(num_classes, record):
    labels = np.array(Image.open(record["sem_seg_file_name"]))
    scores = np.arange(num_classes)[:, None, None] == labels
    return {"sem_seg": torch.from_numpy(scores).float()}


@pytest.mark.parametrize(
    "name, output_of, expected",
    [
        ("lvis", annotated, {"bbox": ("AP", "AP50"), "segm": ("AP", "AP50", "AP75")}),
        ("cityscapes_instance", painted, {"segm": ("AP", "AP50")}),
        ("cityscapes_sem_seg", semantic, {"sem_seg": ("mIoU", "IoU_sup", "iIoU", "iIoU_sup")}),
        ("voc_sem_seg", semantic, {"sem_seg": ("mIoU", "mACC", "pACC")}),
    ],
)
def test_the_truth_scores_100(datasets_folder, tmp_path, monkeypatch, name, output_of, expected):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_folder))
    monkeypatch.delattr(np, "in1d", raising=False)  # as NumPy 2.4 is
    name = f"moco_demo_scenes_{name}_test"
    if output_of is semantic:
        num_classes = len(MetadataCatalog.get(name).stuff_classes)
        results = score(name, lambda record: semantic(num_classes, record), tmp_path)
    else:
        results = score(name, output_of, tmp_path)
    for task, metrics in expected.items():
        for metric in metrics:
            assert results[task][metric] == pytest.approx(100), (task, metric)


def test_a_voc_set_of_one_image_is_read_and_evaluated(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    sizes = dict.fromkeys(SETS, 0) | {"scenes_test": 1}
    render_demo_data(str(tmp_path / "moco_demo"), "voc", sizes, workers=1)
    name = "moco_demo_scenes_voc_test"
    cfg = get_cfg()
    (record,) = DatasetCatalog.get(name)
    evaluator = TransferTrainer.build_evaluator(cfg, name)
    evaluator.reset()
    evaluator.process([record], [annotated(record)])
    things = {a["category_id"] for a in record["annotations"]}
    share = len(things) / len(MetadataCatalog.get(name).thing_classes)
    # Classes that the picture does not show count as 0 in detectron2's mean.
    assert evaluator.evaluate()["bbox"]["AP"] == pytest.approx(100 * share)
