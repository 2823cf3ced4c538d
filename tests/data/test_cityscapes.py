"""detectron2's registered Cityscapes, on its releases and on its main branch."""

import importlib

import cv2
import numpy as np
import pycocotools.mask as mask_util
import pytest
from cityscapesscripts.helpers import labels as public
from detectron2.data import MetadataCatalog
from detectron2.data.datasets.cityscapes import load_cityscapes_instances

import moco_d2  # noqa: F401 (provides the labels)
from moco_d2.data.synthetic import render_demo_data
from moco_d2.data.synthetic.sets import SETS


def test_the_module_that_main_imports_is_the_public_one():
    theirs = importlib.import_module("deeplearning.projects.cityscapesApi." + public.__name__)
    assert theirs.id2label is public.id2label
    for task, kind in (("instance_seg", "cityscapes_instance"), ("sem_seg", "cityscapes_sem_seg")):
        metadata = MetadataCatalog.get(f"cityscapes_fine_{task}_val")
        assert metadata.evaluator_type == kind
        assert (len(metadata.thing_classes), len(metadata.stuff_classes)) == (8, 19)


def test_polygons_are_read_as_the_registered_sets_do(tmp_path):
    pytest.importorskip("shapely")
    sizes = dict.fromkeys(SETS, 0) | {"scenes_test": 4}
    render_demo_data(str(tmp_path), "cityscapes", sizes, workers=1)
    folder = tmp_path / "scenes_cityscapes"
    truth = folder / "gtFine" / "test"
    records = load_cityscapes_instances(str(folder / "leftImg8bit" / "test"), str(truth))
    assert len(records) == 4
    for record in records:
        name = record["image_id"].replace("leftImg8bit", "gtFine_instanceIds")
        ids = cv2.imread(str(truth / "demo" / name), cv2.IMREAD_UNCHANGED)
        masks = [ids == i for i in np.unique(ids[ids >= 1000])]
        assert len(masks) == len(record["annotations"])
        for annotation in record["annotations"]:
            codes = mask_util.frPyObjects(annotation["segmentation"], *ids.shape)
            drawn = mask_util.decode(mask_util.merge(codes)).astype(bool)
            overlaps = [(drawn & mask).sum() / (drawn | mask).sum() for mask in masks]
            assert max(overlaps) > 0.85
