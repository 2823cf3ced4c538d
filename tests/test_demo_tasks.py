"""Every fine-tuning config of configs/demo: it trains from an exported backbone and is evaluated. A
new file is tested by being there."""

import json
import math
from pathlib import Path

import pytest
from detectron2.config import CfgNode, get_cfg

from moco_d2 import add_moco_config
from moco_d2.data.synthetic import SETS, render_demo_data
from moco_d2.data.synthetic.figures import KEYPOINT_OKS_SIGMAS
from moco_d2.engine.setup import trainer_of
from moco_d2.engine.transfer import TransferTrainer
from moco_d2.transfer.plan import Task, task_metrics

ROOT = Path(__file__).parents[1] / "configs/demo"
SMALL = {
    "MODEL.DEVICE": "cpu",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,  # something is found, and scored
    "DATALOADER.NUM_WORKERS": 0,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.MAX_ITER": 2,
    "SOLVER.STEPS": (),
    "SOLVER.WARMUP_ITERS": 0,
    "TEST.DETECTIONS_PER_IMAGE": 10,
    "LOG_PERIOD": 1,
    "SEED": 1,
}


def load(path: Path, **options) -> CfgNode:
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_file(str(path))
    cfg.merge_from_list([item for pair in options.items() for item in pair])
    return cfg


CONFIGS = [path for path in sorted(ROOT.glob("*")) if trainer_of(load(path)) is TransferTrainer]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    families = ("scenes", "novel", "figures")
    sizes = {f"{family}_{split}": 3 for family in families for split in ("train", "test")}
    render_demo_data(str(root / "moco_demo"), sizes=dict.fromkeys(SETS, 0) | sizes, workers=1)
    return str(root)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_two_iterations_from_an_exported_backbone(path, exported, datasets, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", datasets)
    cfg = load(path, **SMALL, **{"MODEL.WEIGHTS": exported, "OUTPUT_DIR": str(tmp_path)})
    trainer = TransferTrainer(cfg)
    trainer.resume_or_load(resume=False)  # raises unless every tensor of the backbone is filled
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    losses = [line["total_loss"] for line in lines if "total_loss" in line]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    evaluated = {key for line in lines for key in line}
    expected = set(task_metrics(Task(path.stem, path), cfg))
    kinds = {key.split("/")[0] for key in expected}
    on = {"segm": cfg.MODEL.MASK_ON, "keypoints": cfg.MODEL.KEYPOINT_ON}
    assert kinds == {"bbox", *(kind for kind in on if on[kind])}
    assert expected <= evaluated


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_says_what_it_is_and_fits_its_data(path):
    cfg = load(path)
    assert path.read_text().startswith("#")
    families = {name.removeprefix("moco_demo_").rpartition("_")[0] for name in cfg.DATASETS.TRAIN}
    assert {f"moco_demo_{family}_test" for family in families} == set(cfg.DATASETS.TEST)
    (classes,) = {len(SETS[f"{family}_test"].classes) for family in families}
    assert classes == cfg.MODEL.ROI_HEADS.NUM_CLASSES
    if cfg.MODEL.KEYPOINT_ON:
        assert tuple(cfg.TEST.KEYPOINT_OKS_SIGMAS) == KEYPOINT_OKS_SIGMAS
        assert len(KEYPOINT_OKS_SIGMAS) == cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
