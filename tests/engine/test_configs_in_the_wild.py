"""Configs and weights as people have them from MoCo's own release run unchanged."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from detectron2.data.datasets.pascal_voc import CLASS_NAMES
from weights import detectron2_resnet

from moco_d2.data.synthetic import render_demo_data
from moco_d2.data.synthetic.sets import SETS
from moco_d2.engine import setup

# In the style of facebookresearch/moco, detection/configs: a base for the norm and the head, one
# for the task, and one that makes it RGB. Nothing in them knows of this project.
FILES = {
    "Base-C4-BN.yaml": """
MODEL:
  META_ARCHITECTURE: "GeneralizedRCNN"
  RPN: {PRE_NMS_TOPK_TEST: 6000, POST_NMS_TOPK_TEST: 1000}
  ROI_HEADS: {NAME: "Res5ROIHeadsExtraNorm"}
  BACKBONE: {FREEZE_AT: 0}
  RESNETS: {NORM: "naiveSyncBN"}
TEST: {PRECISE_BN: {ENABLED: True}}
SOLVER: {IMS_PER_BATCH: 16, BASE_LR: 0.02}
""",
    "voc_24k.yaml": """
_BASE_: "Base-C4-BN.yaml"
MODEL:
  MASK_ON: False
  WEIGHTS: "detectron2://ImageNetPretrained/MSRA/R-50.pkl"
  ROI_HEADS: {NUM_CLASSES: 20}
INPUT:
  MIN_SIZE_TRAIN: (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
  MIN_SIZE_TEST: 800
DATASETS:
  TRAIN: ('voc_2007_trainval', 'voc_2012_trainval')
  TEST: ('voc_2007_test',)
SOLVER:
  STEPS: (18000, 22000)
  MAX_ITER: 24000
  WARMUP_ITERS: 100
""",
    "voc_24k_moco.yaml": """
_BASE_: "voc_24k.yaml"
MODEL:
  PIXEL_MEAN: [123.675, 116.280, 103.530]
  PIXEL_STD: [58.395, 57.120, 57.375]
  WEIGHTS: "See Instructions"
  RESNETS: {STRIDE_IN_1X1: False}
INPUT: {FORMAT: "RGB"}
""",
}
WIDTH = 8
# What makes it small. The config files stay as they are.
SMALL = (
    *("MODEL.RESNETS.STEM_OUT_CHANNELS", WIDTH, "MODEL.RESNETS.WIDTH_PER_GROUP", WIDTH),
    *("MODEL.RESNETS.RES2_OUT_CHANNELS", 4 * WIDTH, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 8),
    *("INPUT.MIN_SIZE_TRAIN", (64,), "INPUT.MIN_SIZE_TEST", 64, "SOLVER.IMS_PER_BATCH", 2),
    *("SOLVER.MAX_ITER", 2, "SOLVER.STEPS", (), "TEST.PRECISE_BN.NUM_ITER", 1),
    *("MODEL.RPN.POST_NMS_TOPK_TEST", 20, "MODEL.RPN.PRE_NMS_TOPK_TEST", 50),
    *("DATALOADER.NUM_WORKERS", 0),
)


@pytest.fixture
def voc(tmp_path):
    """VOC2007 and VOC2012 in a folder for DETECTRON2_DATASETS: scenes under VOC's class names."""
    sizes = dict.fromkeys(SETS, 0) | {"scenes_train": 3, "scenes_test": 12}
    render_demo_data(str(tmp_path), "voc", sizes, workers=1)
    folder, number = tmp_path / "scenes_voc", 0
    for file in sorted((folder / "Annotations").iterdir()):
        tree = ET.parse(file)
        for name in tree.iterfind("object/name"):
            name.text, number = CLASS_NAMES[number % len(CLASS_NAMES)], number + 1
        tree.write(file)
    (folder / "ImageSets/Main/train.txt").rename(folder / "ImageSets/Main/trainval.txt")
    shutil.copytree(folder, tmp_path / "VOC2012")
    folder.rename(tmp_path / "VOC2007")
    return tmp_path


@pytest.fixture
def converted(tmp_path):
    """What MoCo's own converter writes: the projection head left in, no input convention."""
    state = {n: t.numpy() for n, t in detectron2_resnet(50, width=WIDTH).state_dict().items()}
    assert "res2.0.conv1.norm.num_batches_tracked" in state
    for layer in (0, 2):
        state[f"stem.fc.{layer}.weight"] = torch.rand(8, 8).numpy()
        state[f"stem.fc.{layer}.bias"] = torch.rand(8).numpy()
    content = {"model": state, "__author__": "MOCO", "matching_heuristics": True}
    (tmp_path / "output.pkl").write_bytes(pickle.dumps(content))
    return tmp_path / "output.pkl"


def test_mocos_detection_config_with_its_converters_weights(voc, converted, tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    output, root = tmp_path / "run", Path(__file__).parents[2]
    command = [sys.executable, str(root / "tools/train_net.py"), "--config-file"]
    command += [str(tmp_path / "voc_24k_moco.yaml"), *map(str, SMALL)]
    command += ["MODEL.WEIGHTS", str(converted), "OUTPUT_DIR", str(output), "SEED", "1"]
    surroundings = {**os.environ, "DETECTRON2_DATASETS": str(voc), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (output / "log.txt").read_text()
    assert "MODEL.WEIGHTS states no convention" in log
    assert "RGB, mean [123.675, 116.28, 103.53], std [58.395, 57.12, 57.375]" in log
    assert "Loaded all" in log and "New, and initialised at random" in log
    lines = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    assert any(line.get("bbox/AP50", -1) >= 0 for line in lines)
    state = torch.load(output / "model_final.pth", weights_only=True)
    assert state["input"]["format"] == "RGB" and not state["input"]["stride_in_1x1"]
    assert "roi_heads.res5.norm.running_mean" in state["model"]


@pytest.mark.parametrize(
    "name, expected",
    [("voc_24k.yaml", ("BGR", 1.0, True)), ("voc_24k_moco.yaml", ("RGB", 58.395, False))],
)
def test_weights_without_a_convention_leave_it_to_the_config(converted, tmp_path, name, expected):
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    opts = ["MODEL.WEIGHTS", str(converted), "MODEL.DEVICE", "cpu"]
    args = Namespace(config_file=str(tmp_path / name), opts=opts, eval_only=False, resume=False)
    cfg, notes = setup.setup(args, 2)
    model = cfg.MODEL
    assert (cfg.INPUT.FORMAT, model.PIXEL_STD[0], model.RESNETS.STRIDE_IN_1X1) == expected
    # Their norm and schedule are kept.
    assert (model.RESNETS.NORM, cfg.SOLVER.IMS_PER_BATCH) == ("naiveSyncBN", 16)
    assert cfg.SOLVER.STEPS == (18000, 22000)
    assert any("MODEL.WEIGHTS states no convention" in note for note in notes)
