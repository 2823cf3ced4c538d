"""Evaluators of LVIS, Cityscapes and semantic maps: the truth scores 100, and known errors what
they should, on any number of processes."""

import json
import math

import cv2
import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.structures import Boxes, Instances
from detectron2.utils import comm
from support import run_processes
from weights import register_tiny_coco

from moco_d2.evaluation import evaluators
from moco_d2.evaluation.evaluators import EVALUATORS, check_packages

HEIGHT, WIDTH = 64, 96
# Cityscapes' ids of the labels used here, and their trainIds; 0 is not scored.
UNLABELED, ROAD, PERSON, CAR = 0, 7, 24, 26
TRAIN_ID = {ROAD: 0, PERSON: 11, CAR: 13}
THINGS = {CAR: (slice(5, 25), slice(3, 43)), PERSON: (slice(30, 60), slice(50, 60))}


def evaluator(kind, name, folder, masks=True):
    cfg = get_cfg()
    cfg.MODEL.MASK_ON = masks
    result = EVALUATORS[kind](cfg, name, str(folder))
    result.reset()
    return result


def register(name, load, **metadata):
    if name in DatasetCatalog.list():
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
    DatasetCatalog.register(name, load)
    MetadataCatalog.get(name).set(**metadata)


def image_file(root, i):
    return f"{root}/leftImg8bit/val/here/here_000000_{i:06d}_leftImg8bit.png"


def write_cityscapes(root, images):
    """Labels (H, W) and instances (H, W) for each image, registered as "tiny_cityscapes"."""
    folder = root / "gtFine" / "val" / "here"
    folder.mkdir(parents=True, exist_ok=True)
    for i, (labels, instances) in enumerate(images):
        start = f"{folder}/here_000000_{i:06d}_gtFine"
        cv2.imwrite(f"{start}_labelIds.png", labels.astype(np.uint8))
        cv2.imwrite(f"{start}_instanceIds.png", instances.astype(np.uint16))
    register_cityscapes(root)


def register_cityscapes(root):
    classes = MetadataCatalog.get("cityscapes_fine_instance_seg_val").thing_classes
    register("tiny_cityscapes", list, gt_dir=f"{root}/gtFine/val", thing_classes=classes)


def street():
    """A car and a person on a road, and a strip that is not scored."""
    labels = np.full((HEIGHT, WIDTH), ROAD)
    labels[:, 90:] = UNLABELED
    instances = labels.copy()
    for label, place in THINGS.items():
        labels[place], instances[place] = label, 1000 * label
    return labels, instances


def things(masks, classes, scores):
    found = Instances((HEIGHT, WIDTH))
    found.pred_masks = torch.tensor(np.array(masks, bool).reshape(-1, HEIGHT, WIDTH))
    found.pred_classes = torch.tensor(classes, dtype=torch.int64)
    found.scores = torch.tensor(scores, dtype=torch.float32)
    found.pred_boxes = Boxes(found.pred_masks.flatten(1).any(1)[:, None] * torch.ones(1, 4))
    return found


def contiguous(label):
    names = MetadataCatalog.get("tiny_cityscapes").thing_classes
    return names.index({PERSON: "person", CAR: "car"}[label])


def shifted_things(shift):
    """Both things of `street`, moved to the right by so many pixels."""
    masks = [np.roll(street()[1] == 1000 * label, shift, axis=1) for label in THINGS]
    return things(masks, [contiguous(label) for label in THINGS], [0.9, 0.8])


def test_cityscapes_instances_score_by_their_overlap(tmp_path):
    write_cityscapes(tmp_path, [street(), street()])
    average_precision = {}
    for shift in (0, 2):
        judge = evaluator("cityscapes_instance", "tiny_cityscapes", tmp_path)
        for i in range(2):
            image = {"file_name": image_file(tmp_path, i)}
            judge.process([image], [{"instances": shifted_things(shift)}])
        average_precision[shift] = judge.evaluate()["segm"]
    assert average_precision[0]["AP"] == average_precision[0]["AP50"] == pytest.approx(100)
    # Of a thing w wide, 2 pixels are missed and 2 too many: IoU (w - 2) / (w + 2), here 38 / 42
    # for the car and 8 / 12 for the person, above 9 and 4 of the 10 thresholds 0.5, 0.55, ...
    assert average_precision[2]["AP-car"] == pytest.approx(90)
    assert average_precision[2]["AP-person"] == pytest.approx(40)
    assert average_precision[2]["AP"] == pytest.approx(65)
    assert average_precision[2]["AP50"] == pytest.approx(100)
    assert math.isnan(average_precision[2]["AP-train"])  # none is there


def test_cityscapes_semantics_are_ious_over_all_scored_pixels(tmp_path):
    rng = np.random.default_rng(0)
    ids = np.array([UNLABELED, ROAD, PERSON, CAR])
    truths = ids[rng.integers(0, 4, (2, HEIGHT, WIDTH))]
    write_cityscapes(tmp_path, [(truth, truth) for truth in truths])
    predictions = ids[rng.integers(1, 4, truths.shape)]
    right = rng.random(truths.shape) < 0.6
    predictions = np.where(right & (truths != UNLABELED), truths, predictions)
    scores = {}
    for name, maps in (("truth", truths), ("noise", predictions)):
        judge = evaluator("cityscapes_sem_seg", "tiny_cityscapes", tmp_path)
        for i, ids_of_image in enumerate(maps):
            logits = np.zeros((19, HEIGHT, WIDTH), np.float32)
            for label, train_id in TRAIN_ID.items():
                logits[train_id] = ids_of_image == label
            image = {"file_name": image_file(tmp_path, i)}
            judge.process([image], [{"sem_seg": torch.from_numpy(logits)}])
        scores[name] = judge.evaluate()["sem_seg"]
    assert scores["truth"]["mIoU"] == scores["truth"]["IoU_sup"] == 100
    scored = truths != UNLABELED
    ious = []
    for name, label in (("road", ROAD), ("person", PERSON), ("car", CAR)):
        true, predicted = truths == label, (predictions == label) & scored
        ious.append(100 * (true & predicted).sum() / (true | predicted).sum())
        assert scores["noise"][f"IoU-{name}"] == pytest.approx(ious[-1])
    assert scores["noise"]["mIoU"] == pytest.approx(np.mean(ious))


def test_mean_iou_is_that_of_the_definition(tmp_path):
    rng = np.random.default_rng(1)
    truths = rng.choice([0, 1, 2, 255], (2, 20, 30)).astype(np.uint8)
    predictions = rng.integers(0, 3, truths.shape)
    write_semantic(tmp_path, truths)
    scores = {}
    for name, maps in (("truth", np.minimum(truths, 2)), ("noise", predictions)):
        judge = evaluator("sem_seg", "tiny_semantic", tmp_path / "inference")
        for i, labels in enumerate(maps):
            logits = torch.nn.functional.one_hot(torch.tensor(labels).long(), 3).permute(2, 0, 1)
            judge.process([{"file_name": f"{i}.jpg"}], [{"sem_seg": logits.float()}])
        scores[name] = judge.evaluate()["sem_seg"]["mIoU"]
    assert scores["truth"] == 100
    ious = []
    for label in range(3):
        true, predicted = truths == label, (predictions == label) & (truths != 255)
        ious.append(100 * (true & predicted).sum() / (true | predicted).sum())
    assert scores["noise"] == pytest.approx(np.mean(ious))


def write_semantic(root, truths):
    for i, labels in enumerate(truths):
        cv2.imwrite(f"{root}/{i}.png", labels)
    register_semantic(root, len(truths))


def register_semantic(root, count):
    records = [
        {"file_name": f"{i}.jpg", "sem_seg_file_name": f"{root}/{i}.png"} for i in range(count)
    ]
    register("tiny_semantic", lambda: records, stuff_classes=["a", "b", "c"], ignore_label=255)


def write_lvis(root):
    """Two images with both things; LVIS scores a class only in images that are sure about it."""
    names = ("car", "person")
    content = {
        "images": [
            {"id": i, "height": HEIGHT, "width": WIDTH, "neg_category_ids": []} for i in range(2)
        ],
        "categories": [
            {"id": i + 1, "name": name, "frequency": "f", "image_count": 2}
            for i, name in enumerate(names)
        ],
        "annotations": [],
    }
    for image in content["images"]:
        image["not_exhaustive_category_ids"] = []
        for category, (rows, columns) in enumerate(THINGS.values(), start=1):
            x, y, w, h = columns.start, rows.start, columns.stop, rows.stop
            w, h = w - x, h - y
            outline = [x, y, x + w, y, x + w, y + h, x, y + h]
            content["annotations"].append(
                {
                    "id": len(content["annotations"]) + 1,
                    "image_id": image["id"],
                    "category_id": category,
                    "bbox": [x, y, w, h],
                    "area": w * h,
                    "segmentation": [outline],
                }
            )
    (root / "lvis.json").write_text(json.dumps(content))
    register_lvis(root)


def register_lvis(root):
    register("tiny_lvis", list, json_file=f"{root}/lvis.json", thing_classes=["car", "person"])


def lvis_things():
    masks = [street()[1] == 1000 * label for label in THINGS]
    found = things(masks, [0, 1], [0.9, 0.8])
    corners = [[x.start, y.start, x.stop, y.stop] for y, x in THINGS.values()]
    found.pred_boxes = Boxes(torch.tensor(corners, dtype=torch.float32))
    return found


def test_lvis_runs_on_any_numpy_and_knows_what_it_cannot_score(tmp_path):
    write_lvis(tmp_path)
    judge = evaluator("lvis", "tiny_lvis", tmp_path / "inference")
    judge.process([{"image_id": 0}], [{"instances": lvis_things()}])
    judge.process([{"image_id": 1}], [{"instances": things([], [], [])}])
    results = judge.evaluate()
    # Half of the things are found: precision 1 up to recall 0.5, at 51 of 101 points.
    assert results["segm"]["AP"] == results["bbox"]["AP50"] == pytest.approx(100 * 51 / 101)
    assert results["segm"]["APf"] == results["segm"]["AP"]
    assert math.isnan(results["segm"]["APr"])  # no class is rare
    judge.reset()
    for i in range(2):
        judge.process([{"image_id": i}], [{"instances": lvis_things()}])
    results = judge.evaluate()
    assert results["segm"]["AP"] == results["bbox"]["AP"] == pytest.approx(100)


def test_no_prediction_at_all_is_a_result(tmp_path):
    write_cityscapes(tmp_path, [street()])
    write_lvis(tmp_path)
    register_tiny_coco("tiny_coco", tmp_path)
    write_voc(tmp_path)
    expected = {
        ("cityscapes_instance", "tiny_cityscapes"): ("segm", 0.0),
        ("lvis", "tiny_lvis"): ("segm", math.nan),
        ("coco", "tiny_coco"): ("bbox", math.nan),
        ("pascal_voc", "tiny_voc"): ("bbox", 0.0),
    }
    for (kind, name), (task, score) in expected.items():
        judge = evaluator(kind, name, tmp_path / kind)
        image = {"file_name": image_file(tmp_path, 0), "image_id": 0}
        judge.process([image], [{"instances": things([], [], [])}])
        assert judge.evaluate()[task]["AP"] == pytest.approx(score, nan_ok=True), kind


def write_voc(root):
    (root / "Annotations").mkdir()
    (root / "ImageSets" / "Main").mkdir(parents=True)
    (root / "ImageSets" / "Main" / "val.txt").write_text("one\n")
    box = "<xmin>2</xmin><ymin>3</ymin><xmax>9</xmax><ymax>9</ymax>"
    thing = "<name>car</name><pose>u</pose><truncated>0</truncated><difficult>0</difficult>"
    (root / "Annotations" / "one.xml").write_text(
        f"<annotation><object>{thing}<bndbox>{box}</bndbox></object></annotation>"
    )
    register(
        "tiny_voc", list, dirname=str(root), split="val", year=2012, thing_classes=["car", "dog"]
    )


def _evaluate_share(folder, shift):
    """Every process judges every so-maniest image."""
    register_cityscapes(folder)
    results = {}
    for kind in ("cityscapes_instance", "cityscapes_sem_seg"):
        judge = evaluator(kind, "tiny_cityscapes", folder)
        for i in range(comm.get_rank(), 3, comm.get_world_size()):
            logits = torch.zeros(19, HEIGHT, WIDTH)
            for label, train_id in TRAIN_ID.items():
                logits[train_id] = torch.tensor(np.roll(street()[0] == label, shift + i, axis=1))
            output = {"instances": shifted_things(shift + i), "sem_seg": logits}
            judge.process([{"file_name": image_file(folder, i)}], [output])
        results[kind] = judge.evaluate()
    if comm.is_main_process():
        torch.save(results, f"{folder}/{comm.get_world_size()}.pt")
    else:
        assert set(results.values()) == {None}


def test_cityscapes_scores_are_those_of_all_processes_images(tmp_path):
    write_cityscapes(tmp_path, [street()] * 3)
    _evaluate_share(tmp_path, 2)
    run_processes(_evaluate_share, 2, tmp_path, 2)
    alone, together = (torch.load(tmp_path / f"{n}.pt") for n in (1, 2))
    for kind, results in alone.items():
        for task, scores in results.items():
            assert together[kind][task] == pytest.approx(scores, nan_ok=True)
            assert any(0 < score < 100 for score in scores.values())


def test_missing_truth_is_named(tmp_path):
    write_cityscapes(tmp_path, [street()])
    judge = evaluator("cityscapes_instance", "tiny_cityscapes", tmp_path)
    with pytest.raises(FileNotFoundError, match="here_000000_000007_gtFine_instanceIds.png"):
        judge.process([{"file_name": image_file(tmp_path, 7)}], [{"instances": shifted_things(0)}])


def test_missing_packages_are_named_before_training(monkeypatch):
    for name, package in (
        ("lvis_v0.5_train", "lvis"),
        ("cityscapes_fine_instance_seg_train", "cityscapesscripts"),
        ("cityscapes_fine_instance_seg_train", "shapely"),
        ("cityscapes_fine_sem_seg_val", "cityscapesscripts"),
    ):
        finder = evaluators.importlib.util
        monkeypatch.setattr(finder, "find_spec", lambda module: True)
        check_packages([name, "coco_2017_val", "nowhere"])
        monkeypatch.setattr(
            finder, "find_spec", lambda module, gone=package: module != gone or None
        )
        with pytest.raises(ValueError, match=f"{name!r} needs the package {package}, .* pip inst"):
            check_packages(["coco_2017_val", "nowhere", name])
