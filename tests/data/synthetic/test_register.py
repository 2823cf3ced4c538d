"""The registered sets work with detectron2's own loaders and evaluators."""

import copy
import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
import pytest
import torch
from cityscapesscripts.helpers.annotation import Annotation
from cityscapesscripts.helpers.labels import name2label
from cityscapesscripts.preparation.json2instanceImg import createInstanceImage
from cityscapesscripts.preparation.json2labelImg import createLabelImage
from detectron2.config import get_cfg
from detectron2.data import (
    DatasetCatalog,
    DatasetMapper,
    MetadataCatalog,
    build_detection_train_loader,
    detection_utils,
)
from detectron2.evaluation import COCOEvaluator, PascalVOCDetectionEvaluator, SemSegEvaluator
from detectron2.structures import Boxes, BoxMode, Instances, polygons_to_bitmask
from PIL import Image

from moco_d2.data.synthetic import register_demo_datasets, render_demo_data
from moco_d2.data.synthetic.figures import KEYPOINT_OKS_SIGMAS
from moco_d2.data.synthetic.layouts import LAYOUTS
from moco_d2.data.synthetic.outlines import mask_to_box
from moco_d2.data.synthetic.pictures import IGNORE_LABEL
from moco_d2.data.synthetic.sets import SETS
from moco_d2.data.synthetic.shapes import SHAPES

SIZES = {
    "objects_train": 48,
    "objects_val": 16,
    "scenes_train": 30,
    "scenes_test": 30,
    "novel_train": 14,
    "novel_test": 30,
    "figures_train": 12,
    "figures_test": 12,
    "scenes_val": 12,
    "novel_val": 12,
    "figures_val": 12,
}
COCO_SETS = [name for name in SETS if not name.startswith("objects")]
VOC_SETS = [name for name in COCO_SETS if not name.startswith("figures")]


@pytest.fixture(scope="module")
def datasets_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    for layout in LAYOUTS:
        render_demo_data(str(folder / "moco_demo"), layout, SIZES, workers=2)
    return folder


@pytest.fixture
def rendered(datasets_folder, monkeypatch):
    # Set after the sets were registered, which happened on import.
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets_folder))
    return datasets_folder / "moco_demo"


def truth_as_prediction(record):
    """A detectron2 output that says exactly what is annotated."""
    annotations, size = record["annotations"], (record["height"], record["width"])
    instances = Instances(size)
    boxes = [BoxMode.convert(a["bbox"], a["bbox_mode"], BoxMode.XYXY_ABS) for a in annotations]
    instances.pred_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32))
    instances.pred_classes = torch.tensor([a["category_id"] for a in annotations])
    instances.scores = torch.ones(len(annotations))
    if "segmentation" in annotations[0]:
        masks = [polygons_to_bitmask(a["segmentation"], *size) for a in annotations]
        instances.pred_masks = torch.from_numpy(np.array(masks))
    if "keypoints" in annotations[0]:
        keypoints = [np.reshape(a["keypoints"], (-1, 3)) for a in annotations]
        instances.pred_keypoints = torch.tensor(np.array(keypoints), dtype=torch.float32)
    return {"instances": instances}


def evaluate(evaluator, records, outputs):
    evaluator.reset()
    for record, output in zip(records, outputs, strict=True):
        evaluator.process([record], [output])
    return evaluator.evaluate()


@pytest.mark.parametrize("name", COCO_SETS)
def test_coco_evaluation_of_the_truth_is_perfect(rendered, tmp_path, name):
    name = f"moco_demo_{name}"
    records = DatasetCatalog.get(name)
    tasks = ("bbox", "segm", "keypoints") if "figures" in name else ("bbox", "segm")
    evaluator = COCOEvaluator(
        name,
        tasks=tasks,
        distributed=False,
        output_dir=str(tmp_path),
        kpt_oks_sigmas=KEYPOINT_OKS_SIGMAS,
    )
    results = evaluate(evaluator, records, [truth_as_prediction(r) for r in records])
    assert {task: results[task]["AP"] for task in tasks} == pytest.approx(dict.fromkeys(tasks, 100))
    assert MetadataCatalog.get(name).evaluator_type == "coco"


@pytest.mark.parametrize("name", VOC_SETS)
def test_voc_evaluation_of_the_truth_is_perfect(rendered, name):
    family, split = name.split("_")
    name = f"moco_demo_{family}_voc_{split}"
    records = DatasetCatalog.get(name)
    outputs = [truth_as_prediction(record) for record in records]
    results = evaluate(PascalVOCDetectionEvaluator(name), records, outputs)
    assert results["bbox"]["AP"] == pytest.approx(100)
    assert MetadataCatalog.get(name).evaluator_type == "pascal_voc"


@pytest.mark.parametrize("name", COCO_SETS)
def test_semantic_evaluation_of_the_truth_is_perfect(rendered, name):
    name = f"moco_demo_{name}"
    records = DatasetCatalog.get(name)
    num_classes = len(MetadataCatalog.get(name).stuff_classes)
    outputs = []
    for record in records:
        labels = detection_utils.read_image(record["sem_seg_file_name"], "L")[..., 0]
        scores = np.arange(num_classes)[:, None, None] == labels
        outputs.append({"sem_seg": torch.from_numpy(scores).float()})
    results = evaluate(SemSegEvaluator(name, distributed=False), records, outputs)
    assert results["sem_seg"]["mIoU"] == pytest.approx(100)


@pytest.mark.parametrize("name", VOC_SETS)
def test_both_layouts_say_the_same(rendered, name):
    family, split = name.split("_")
    coco = DatasetCatalog.get(f"moco_demo_{name}")
    voc = DatasetCatalog.get(f"moco_demo_{family}_voc_{split}")
    for one, other in zip(coco, voc, strict=True):
        images = [detection_utils.read_image(r["file_name"], "RGB") for r in (one, other)]
        assert np.abs(images[0].astype(float) - images[1]).mean() < 2  # grey levels, by JPEG
        for a, b in zip(one["annotations"], other["annotations"], strict=True):
            box = BoxMode.convert(a["bbox"], a["bbox_mode"], b["bbox_mode"])
            assert a["category_id"] == b["category_id"] and list(box) == b["bbox"]


@pytest.mark.parametrize("name", VOC_SETS)
def test_lvis_says_the_same_and_what_is_known_of_the_other_classes(rendered, name):
    family, split = name.split("_")
    lvis_name, labels = f"moco_demo_{family}_lvis_{split}", range(len(SETS[name].classes))
    coco, lvis = DatasetCatalog.get(f"moco_demo_{name}"), DatasetCatalog.get(lvis_name)
    for one, other in zip(coco, lvis, strict=True):
        image = detection_utils.read_image(other["file_name"], "RGB")
        assert np.array_equal(detection_utils.read_image(one["file_name"], "RGB"), image)
        for a, b in zip(one["annotations"], other["annotations"], strict=True):
            assert a.pop("iscrowd") == 0 and a == b
        absent = {i - 1 for i in other["neg_category_ids"]}
        unsure = {i - 1 for i in other["not_exhaustive_category_ids"]}
        present = {a["category_id"] for a in one["annotations"]}
        assert not absent & present and unsure <= present
        hidden = np.any(SETS[name].picture(one["image_id"], seed=0).semantic == IGNORE_LABEL)
        assert (unsure, absent) == (present, set()) if hidden else (absent and not unsure)
        assert absent | present < set(labels)
    content = json.loads(Path(MetadataCatalog.get(lvis_name).json_file).read_text())
    for label, category in zip(labels, content["categories"], strict=True):
        images = sum(any(a["category_id"] == label for a in r["annotations"]) for r in coco)
        assert category["name"] == SETS[name].classes[label] and category["id"] == label + 1
        assert category["image_count"] == images
        assert category["frequency"] == ("r" if images <= 10 else "c")


@pytest.mark.parametrize("name", VOC_SETS)
def test_voc_has_the_semantic_labels_in_colours_and_plain(rendered, name):
    family, split = name.split("_")
    records = DatasetCatalog.get(f"moco_demo_{family}_voc_sem_seg_{split}")
    assert (
        MetadataCatalog.get(f"moco_demo_{family}_voc_sem_seg_{split}").evaluator_type == "sem_seg"
    )
    folder = rendered / f"{family}_voc"
    for number, record in enumerate(records, start=1):
        expected = SETS[name].picture(number, seed=0).semantic
        coloured = Image.open(folder / f"SegmentationClass/{record['image_id']}.png")
        plain = Image.open(folder / f"SegmentationClassAug/{record['image_id']}.png")
        assert (coloured.mode, plain.mode) == ("P", "L")
        assert np.array_equal(coloured, expected) and np.array_equal(plain, expected)
        assert np.array_equal(Image.open(record["sem_seg_file_name"]), expected)
    # The first colours of VOC's table: aeroplane, bicycle, bird, boat; and the border's.
    palette = np.reshape(coloured.getpalette(), (256, 3)).tolist()
    assert palette[:5] == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0], [0, 0, 128]]
    assert palette[255] == [224, 224, 192]
    names = (folder / f"ImageSets/Segmentation/{split}.txt").read_text().split()
    assert names == [record["image_id"] for record in records]


@pytest.mark.parametrize("name", VOC_SETS)
def test_cityscapes_shows_shapes_as_its_own_classes(rendered, name):
    family, split = name.split("_")
    things = MetadataCatalog.get(f"moco_demo_{family}_cityscapes_instance_{split}").thing_classes
    folder = rendered / f"{family}_cityscapes/gtFine/{split}/demo"
    instances = DatasetCatalog.get(f"moco_demo_{family}_cityscapes_instance_{split}")
    semantic = DatasetCatalog.get(f"moco_demo_{family}_cityscapes_sem_seg_{split}")
    assert len(instances) == len(semantic) == SIZES[name]
    semantic = {record["file_name"]: record for record in semantic}
    differing = 0
    for record in instances:
        stem = Path(record["file_name"]).name.removesuffix("_leftImg8bit.png")
        picture = SETS[name].picture(int(stem.split("_")[-1]), seed=0)
        image = detection_utils.read_image(record["file_name"], "RGB")
        assert np.array_equal(image, picture.image)
        shapes = [SETS[name].classes[i.label].split("_")[1] for i in picture.instances]
        expected = sorted(list(SHAPES).index(shape) for shape in shapes)
        assert sorted(a["category_id"] for a in record["annotations"]) == expected
        train_labels = np.zeros(picture.semantic.shape)  # road
        train_labels[picture.semantic == IGNORE_LABEL] = 255
        for instance, shape in zip(picture.instances, shapes, strict=True):
            label = name2label[things[list(SHAPES).index(shape)]]
            train_labels[instance.mask] = label.trainId
        path = semantic[record["file_name"]]["sem_seg_file_name"]
        assert np.array_equal(detection_utils.read_image(path, "L")[..., 0], train_labels)
        # Cityscapes' own tools draw its PNGs from the polygons.
        annotation = Annotation()
        annotation.fromJsonFile(str(folder / f"{stem}_gtFine_polygons.json"))
        for draw, kind in (createInstanceImage, "instanceIds"), (createLabelImage, "labelIds"):
            drawn = np.asarray(draw(annotation, "ids"))
            differing += np.count_nonzero(
                drawn != np.asarray(Image.open(folder / f"{stem}_gtFine_{kind}.png"))
            )
    assert differing < 1e-4 * 2 * picture.semantic.size * len(instances)


@pytest.mark.parametrize("name", COCO_SETS)
def test_annotations_are_those_of_the_rendered_picture(rendered, name):
    metadata = MetadataCatalog.get(f"moco_demo_{name}")
    for record in DatasetCatalog.get(f"moco_demo_{name}"):
        picture = SETS[name].picture(record["image_id"], seed=0)
        labels = detection_utils.read_image(record["sem_seg_file_name"], "L")[..., 0]
        assert np.array_equal(labels, picture.semantic)
        for written, instance in zip(record["annotations"], picture.instances, strict=True):
            size = instance.mask.shape
            codes = mask_util.frPyObjects(written["segmentation"], *size)
            assert np.array_equal(mask_util.decode(mask_util.merge(codes)), instance.mask)
            box = BoxMode.convert(written["bbox"], written["bbox_mode"], BoxMode.XYXY_ABS)
            assert tuple(box) == mask_to_box(instance.mask)
            assert written["category_id"] == instance.label
            (label,) = np.unique(labels[instance.mask])
            assert metadata.stuff_classes[label] == SETS[name].classes[instance.label]
            assert metadata.thing_classes[instance.label] == SETS[name].classes[instance.label]


@pytest.mark.parametrize("name, scale", [("scenes_train", 1), ("figures_train", 1.5)])
def test_detectron2_trains_on_it_with_its_defaults(rendered, name, scale):
    """Resizing must not truncate whole coordinates; polygons are detectron2's default."""
    cfg = get_cfg()
    cfg.MODEL.MASK_ON = True
    cfg.MODEL.KEYPOINT_ON = name.startswith("figures")
    cfg.DATASETS.TRAIN = (f"moco_demo_{name}",)
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.SOLVER.IMS_PER_BATCH = 4
    cfg.INPUT.MIN_SIZE_TRAIN = (int(128 * scale),)
    cfg.INPUT.RANDOM_FLIP = "none"
    assert cfg.INPUT.MASK_FORMAT == "polygon"
    mapper = DatasetMapper(cfg, is_train=True)
    for sample in next(iter(build_detection_train_loader(cfg, mapper=mapper))):
        picture = SETS[name].picture(sample["image_id"], seed=0)
        side = int(128 * scale)
        assert sample["image"].shape == (3, side, side)
        assert sample["sem_seg"].shape == (side, side)
        truth = sample["instances"]
        boxes = np.array([mask_to_box(i.mask) for i in picture.instances])
        assert np.array_equal(truth.gt_boxes.tensor.numpy(), boxes * np.float32(scale))
        areas = np.array([np.count_nonzero(i.mask) for i in picture.instances])
        assert truth.gt_masks.area().numpy() == pytest.approx(areas * scale**2)
        if cfg.MODEL.KEYPOINT_ON:
            expected = np.array([i.keypoints for i in picture.instances], float)
            expected[..., :2] = (expected[..., :2] + 0.5) * scale
            expected[expected[..., 2] == 0] = 0
            assert np.allclose(truth.gt_keypoints.tensor.numpy(), expected)


def test_object_dicts_name_the_image_and_its_class(rendered):
    metadata = MetadataCatalog.get("moco_demo_objects_train")
    records = DatasetCatalog.get("moco_demo_objects_train")
    assert len(records) == 48 and metadata.evaluator_type == "image_folder"
    assert metadata.image_root == str(rendered / "objects/train")
    assert list(metadata.classes) == sorted(p.name for p in (rendered / "objects/train").iterdir())
    for record in records:
        image = detection_utils.read_image(record["file_name"], "RGB")
        assert image.shape == (record["height"], record["width"], 3)
        assert f"/{metadata.classes[record['label']]}/" in record["file_name"]


def test_metadata_paths_follow_the_environment(monkeypatch):
    for folder in ("first", "second"):
        monkeypatch.setenv("DETECTRON2_DATASETS", folder)
        metadata = MetadataCatalog.get("moco_demo_scenes_test")
        assert metadata.json_file == f"{folder}/moco_demo/scenes/annotations/instances_test.json"
        assert MetadataCatalog.get("moco_demo_novel_voc_test").dirname.startswith(folder)
        assert copy.deepcopy(metadata).json_file == metadata.json_file
    with pytest.raises(AttributeError, match="no_such_thing"):
        metadata.no_such_thing  # noqa: B018


def test_registering_again_changes_nothing():
    before = [(name, MetadataCatalog.get(name)) for name in DatasetCatalog.list()]
    register_demo_datasets()
    after = [(name, MetadataCatalog.get(name)) for name in DatasetCatalog.list()]
    assert [n for n, _ in after] == [n for n, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))


@pytest.fixture
def no_data_root(tmp_path, monkeypatch):
    """A DETECTRON2_DATASETS folder with nothing in it."""
    root = tmp_path / "datasets"
    root.mkdir()
    monkeypatch.setenv("DETECTRON2_DATASETS", str(root))
    return root


@pytest.mark.parametrize("name", ["moco_demo_objects_val", "moco_demo_scenes_voc_train"])
def test_a_missing_set_gives_the_command_that_renders_it(no_data_root, name):
    with pytest.raises(FileNotFoundError) as error:
        DatasetCatalog.get(name)
    message = str(error.value)
    assert name in message and str(no_data_root) in message

    command = shlex.split(message.split("render it with: ")[1])
    sizes = [f"--{set_name.replace('_', '-')}=3" for set_name in SETS]
    assert command[:3] == ["python", "-m", "moco_d2.data.synthetic"]
    subprocess.run([sys.executable, *command[1:], *sizes], check=True)
    assert len(DatasetCatalog.get(name)) == 3
