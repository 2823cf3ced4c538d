"""Every transfer config: it merges, builds, keeps to the paper's recipe, names no weights."""

import functools
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from detectron2 import model_zoo
from detectron2.config import get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_backbone
from weights import RGB

from moco_d2 import add_moco_config
from moco_d2.checkpoint import convention_of
from moco_d2.engine import setup
from moco_d2.engine.scaling import scale_to_processes
from moco_d2.engine.transfer import TransferTrainer
from moco_d2.errors import UserError
from moco_d2.transfer.published import published_results

ROOT = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(ROOT.glob("transfer/*.yaml")) + [ROOT / "demo/scenes_faster_rcnn_R18_FPN.yaml"]


TASKS = [path for path in CONFIGS if not path.name.startswith("Base-")]


def load(path, ours=True):
    cfg = get_cfg()
    if ours:
        add_moco_config(cfg)
    cfg.set_new_allowed("densepose" in path.name)  # a project of detectron2 with keys of its own
    cfg.merge_from_file(str(path))
    return cfg


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_independent_of_the_initialisation(path):
    cfg, text = load(path), path.read_text()
    assert text.startswith("#") and "VERSION: 2" in text
    assert cfg.MODEL.WEIGHTS == "" and "WEIGHTS:" not in text
    assert cfg.MODEL.BACKBONE.FREEZE_AT == 0
    reference = 0 if "demo" in path.parts else 64 if "ViT" in path.name else 8
    assert reference == cfg.SOLVER.REFERENCE_WORLD_SIZE
    if "ViT" not in path.name:
        assert convention_of(cfg) == RGB
        assert cfg.MODEL.RESNETS.NORM == "SyncBN"


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_the_header_shows_the_numbers_of_the_published_table(path):
    task = published_results().tasks.get(path.stem)
    header = "".join(line for line in path.read_text().splitlines(True) if line[0] == "#")
    if task is None:
        assert "Published" not in header
        return
    _, published = header.split("# Published")
    published = re.sub(r"\(.*?\)", "", published, flags=re.DOTALL)  # notes on the numbers
    shown = {float(number) for number in re.findall(r"\d+\.\d+", published)}
    values = {value.value for value in task.values}
    assert shown and shown <= values
    verified = {value.value for value in task.values if value.verified}
    assert shown <= verified or "unverified" in published


PAPER = {
    # iterations, steps, warm-up, learning rate, batch, shortest sides, classes
    "coco_R50_C4_1x": (90000, (60000, 80000), 1000, 0.02, 16, (640, 800), 80),
    "coco_R50_C4_2x": (180000, (120000, 160000), 1000, 0.02, 16, (640, 800), 80),
    "coco_R50_FPN_1x": (90000, (60000, 80000), 1000, 0.02, 16, (640, 800), 80),
    "coco_R50_FPN_1x_4conv1fc": (90000, (60000, 80000), 1000, 0.02, 16, (640, 800), 80),
    "coco_R50_FPN_2x": (180000, (120000, 160000), 1000, 0.02, 16, (640, 800), 80),
    "coco_densepose_R50_FPN_s1x": (130000, (100000, 120000), 1000, 0.01, 16, (640, 800), 1),
    "coco_keypoint_R50_FPN_2x": (180000, (120000, 160000), 1000, 0.02, 16, (640, 800), 1),
    "lvis_v0.5_R50_FPN_2x": (180000, (120000, 160000), 1000, 0.02, 16, (640, 800), 1230),
    "voc_0712_R50_C4_24k": (24000, (18000, 22000), 100, 0.02, 16, (480, 800), 20),
    "voc_0712_R50_DC5_24k": (24000, (18000, 22000), 100, 0.02, 16, (480, 800), 20),
    "voc_07_R50_C4_9k": (9000, (6750, 8250), 100, 0.02, 16, (480, 800), 20),
}


@pytest.mark.parametrize("name", PAPER)
def test_recipes_are_the_papers(name):
    cfg = load(ROOT / "transfer" / f"{name}.yaml")
    solver, (low, high) = cfg.SOLVER, PAPER[name][5]
    schedule = (solver.MAX_ITER, solver.STEPS, solver.WARMUP_ITERS)
    recipe = (*schedule, solver.BASE_LR, solver.IMS_PER_BATCH, (low, high))
    assert (*recipe, cfg.MODEL.ROI_HEADS.NUM_CLASSES) == PAPER[name]
    sides = tuple(range(low, high + 1, 32))
    assert sides == cfg.INPUT.MIN_SIZE_TRAIN
    assert cfg.INPUT.MIN_SIZE_TEST == 800 and cfg.TEST.PRECISE_BN.ENABLED
    masks = name.startswith(("coco_R50", "lvis"))
    assert cfg.MODEL.MASK_ON is masks
    if "_C4_" in name:
        assert cfg.MODEL.ROI_HEADS.NAME == "Res5ROIHeadsExtraNorm"
    else:
        box_head = (4, 1) if "4conv1fc" in name else (0, 2)
        assert box_head == (cfg.MODEL.ROI_BOX_HEAD.NUM_CONV, cfg.MODEL.ROI_BOX_HEAD.NUM_FC)
    if "_FPN_" in name:
        heads = "SyncBN" if "4conv1fc" in name else ""
        norms = (cfg.MODEL.FPN.NORM, cfg.MODEL.ROI_BOX_HEAD.NORM, cfg.MODEL.ROI_MASK_HEAD.NORM)
        assert norms == ("SyncBN", heads, heads)


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_any_number_of_processes_sees_the_same_images_at_the_same_rate(path):
    one = load(path)
    reference = one.SOLVER.REFERENCE_WORLD_SIZE or 8
    one.SOLVER.REFERENCE_WORLD_SIZE = reference
    for processes in (1, 2, 4, 8, 16):
        cfg, notes = scale_to_processes(one, processes)
        batch = cfg.SOLVER.IMS_PER_BATCH
        assert batch == one.SOLVER.IMS_PER_BATCH * processes / reference
        scale, share = processes / reference, one.SOLVER.IMS_PER_BATCH
        assert cfg.SOLVER.BASE_LR / batch == pytest.approx(one.SOLVER.BASE_LR / share)
        for before, after in (
            (one.SOLVER.MAX_ITER, cfg.SOLVER.MAX_ITER),
            (one.SOLVER.WARMUP_ITERS, cfg.SOLVER.WARMUP_ITERS),
            (one.TEST.PRECISE_BN.NUM_ITER, cfg.TEST.PRECISE_BN.NUM_ITER),
            (one.SOLVER.CHECKPOINT_PERIOD, cfg.SOLVER.CHECKPOINT_PERIOD),
            *zip(one.SOLVER.STEPS, cfg.SOLVER.STEPS, strict=True),
        ):
            assert after == round(before / scale)
        assert bool(notes) == (processes != reference)
        # What it costs is said where there is batch norm.
        costs = processes < reference and "ViT" not in path.name
        assert any("batch norm sees" in note for note in notes) == costs


def test_four_gpus_follow_the_rule_of_mocos_authors():
    # facebookresearch/moco#11: 2 images per GPU as before, twice the iterations, half the rate.
    cfg, notes = scale_to_processes(load(ROOT / "transfer/voc_0712_R50_C4_24k.yaml"), 4)
    solver = cfg.SOLVER
    assert (solver.IMS_PER_BATCH, solver.BASE_LR) == (8, 0.01)
    assert (solver.MAX_ITER, solver.STEPS) == (48000, (36000, 44000))
    assert notes[0] == "SOLVER.IMS_PER_BATCH 16 -> 8 (SOLVER.REFERENCE_WORLD_SIZE 8 -> 4)"
    assert "8 images instead of 16" in notes[-1]


def test_batches_that_do_not_divide_are_refused():
    cfg = load(ROOT / "transfer/voc_0712_R50_C4_24k.yaml")
    cfg.SOLVER.IMS_PER_BATCH = 12
    with pytest.raises(UserError, match="IMS_PER_BATCH 12 is for SOLVER.REFERENCE_WORLD_SIZE 8"):
        scale_to_processes(cfg, 2)
    cfg.SOLVER.REFERENCE_WORLD_SIZE = 0
    assert scale_to_processes(cfg, 4) == (cfg, [])
    with pytest.raises(UserError, match="IMS_PER_BATCH 12 does not divide by 5 processes"):
        scale_to_processes(cfg, 5)


def test_dc5_is_the_papers():
    """A.1: stride 16, dilation 2 in conv5, a 3x3 convolution with BN to 512 channels, no more."""
    cfg = load(ROOT / "transfer/voc_0712_R50_DC5_24k.yaml")
    cfg.MODEL.RESNETS.NORM = "BN"
    backbone = build_backbone(cfg)
    assert backbone.output_shape() == {"dc5": ShapeSpec(channels=512, stride=16)}
    assert {block.conv2.dilation for block in backbone.bottom_up.res5} == {(2, 2)}
    images = torch.rand(2, 3, 64, 96)
    out = backbone(images)["dc5"]
    assert out.shape == (2, 512, 4, 6)
    reduction = backbone.reduction
    expected = F.conv2d(backbone.bottom_up(images)["res5"], reduction.weight, padding=1)
    mean, var = expected.mean((0, 2, 3), True), expected.var((0, 2, 3), False, keepdim=True)
    torch.testing.assert_close(out, (expected - mean) / (var + 1e-5).sqrt(), rtol=1e-3, atol=1e-3)
    assert reduction.weight.shape == (512, 2048, 3, 3) and reduction.bias is None


def test_densepose_is_asked_for_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "densepose", None)  # as where it is not installed
    path = str(ROOT / "transfer/coco_densepose_R50_FPN_s1x.yaml")
    args = Namespace(config_file=path, opts=[], eval_only=False, resume=False)
    with pytest.raises(UserError, match="is for DensePose, a project in .*install it with: pip"):
        setup.setup(args, 1)


@pytest.mark.parametrize(
    "path", [p for p in TASKS if "densepose" not in p.name], ids=lambda path: path.stem
)
def test_every_task_is_ready_to_run_in_detectron2s_own_data_sets(path):
    if "cityscapes_instance" in path.name:
        pytest.importorskip("shapely")
    cfg, notes = TransferTrainer.effective_config(load(path), 1)
    if "ViT" not in path.name:
        assert cfg.MODEL.RESNETS.NORM == "BN"
        assert any("MODEL.RESNETS.NORM: SyncBN -> BN" in note for note in notes)
    table = TransferTrainer.describe(cfg, 1, notes)
    assert f"{cfg.SOLVER.IMS_PER_BATCH} = 1 process(es)" in table


@pytest.mark.parametrize(
    "name, classes, crop, lr, iterations",
    [
        ("voc_semseg_FCN_R50_30k", 21, 513, 0.003, 30000),
        ("cityscapes_semseg_FCN_R50_90k", 19, 769, 0.01, 90000),
    ],
)
def test_semantic_segmentation_is_that_of_the_papers_appendix(name, classes, crop, lr, iterations):
    cfg = load(ROOT / "transfer" / f"{name}.yaml")
    expected = {
        "SOLVER.IMS_PER_BATCH": 16,
        "SOLVER.BASE_LR": lr,
        "SOLVER.WEIGHT_DECAY": 1e-4,
        "SOLVER.MAX_ITER": iterations,
        "SOLVER.STEPS": (iterations * 7 // 10, iterations * 9 // 10),
        "SOLVER.GAMMA": 0.1,
        "SOLVER.WARMUP_ITERS": 0,
        "INPUT.SEM_SEG.CROP_SIZE": crop,
        "INPUT.SEM_SEG.SCALE": (0.5, 2.0),
        "INPUT.RANDOM_FLIP": "horizontal",
        "INPUT.MIN_SIZE_TEST": 0,
        "MODEL.SEM_SEG_HEAD.NAME": "FCNHead",
        "MODEL.SEM_SEG_HEAD.NORM": "SyncBN",
        "MODEL.SEM_SEG_HEAD.CONVS_DIM": 256,
        "MODEL.SEM_SEG_HEAD.NUM_CLASSES": classes,
        "MODEL.SEM_SEG_HEAD.IGNORE_VALUE": 255,
        "MODEL.RESNETS.RES5_DILATION": 2,
    }
    for key, value in expected.items():
        assert functools.reduce(getattr, key.split("."), cfg) == value, key
    effective, notes = TransferTrainer.effective_config(cfg, 1)
    assert effective.MODEL.SEM_SEG_HEAD.NORM == "BN"
    table = TransferTrainer.describe(effective, 1, notes)
    assert "SemanticSegmentor, FCNHead" in table and f"{crop} px of pictures scaled" in table


def test_cityscapes_instances_follow_detectron2s_config_but_for_its_start():
    cfg = load(ROOT / "transfer" / "cityscapes_instance_R50_FPN_24k.yaml")
    theirs = get_cfg()
    theirs.merge_from_file(model_zoo.get_config_file("Cityscapes/mask_rcnn_R_50_FPN.yaml"))
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (theirs.DATASETS.TRAIN, theirs.DATASETS.TEST)
    for key in ("BASE_LR", "IMS_PER_BATCH", "MAX_ITER", "STEPS", "WARMUP_ITERS", "WEIGHT_DECAY"):
        assert cfg.SOLVER[key] == theirs.SOLVER[key], key
    for key in ("MIN_SIZE_TRAIN", "MIN_SIZE_TEST", "MAX_SIZE_TRAIN", "MAX_SIZE_TEST"):
        assert cfg.INPUT[key] == theirs.INPUT[key], key
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == theirs.MODEL.ROI_HEADS.NUM_CLASSES == 8
    assert cfg.MODEL.FPN.NORM == "SyncBN" and cfg.MODEL.MASK_ON
