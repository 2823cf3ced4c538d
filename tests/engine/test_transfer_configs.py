"""Every transfer config: it merges, builds, keeps to the paper's recipe, names no weights."""

from pathlib import Path

import pytest
from detectron2.config import get_cfg
from weights import RGB

from moco_d2 import add_moco_config
from moco_d2.checkpoint import convention_of
from moco_d2.engine.transfer import TransferTrainer

ROOT = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(ROOT.glob("transfer/*.yaml")) + [ROOT / "demo/scenes_faster_rcnn_R18_FPN.yaml"]


def load(path, ours=True):
    cfg = get_cfg()
    if ours:
        add_moco_config(cfg)
    cfg.merge_from_file(str(path))
    return cfg


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_detectron2s_own_and_independent_of_the_initialisation(path):
    cfg = load(path, ours=False)  # no key of this project's: detectron2 alone can run them
    text = path.read_text()
    assert text.startswith("#") and "VERSION: 2" in text
    assert cfg.MODEL.WEIGHTS == "" and "WEIGHTS:" not in text
    assert convention_of(cfg) == RGB
    assert cfg.MODEL.BACKBONE.FREEZE_AT == 0
    assert cfg.MODEL.RESNETS.NORM == "SyncBN"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("coco_R50_FPN_1x", (90000, (60000, 80000), (640, 672, 704, 736, 768, 800), 80, 1000)),
        ("coco_R50_C4_2x", (180000, (120000, 160000), (640, 672, 704, 736, 768, 800), 80, 1000)),
        ("voc_0712_R50_C4_24k", (24000, (18000, 22000), tuple(range(480, 801, 32)), 20, 100)),
    ],
)
def test_recipes_are_the_papers(name, expected):
    cfg = load(ROOT / "transfer" / f"{name}.yaml")
    solver = cfg.SOLVER
    recipe = (solver.MAX_ITER, solver.STEPS, cfg.INPUT.MIN_SIZE_TRAIN)
    assert (*recipe, cfg.MODEL.ROI_HEADS.NUM_CLASSES, solver.WARMUP_ITERS) == expected
    assert (solver.IMS_PER_BATCH, solver.BASE_LR, cfg.INPUT.MIN_SIZE_TEST) == (16, 0.02, 800)
    assert cfg.TEST.PRECISE_BN.ENABLED
    assert name.startswith("coco") == cfg.MODEL.MASK_ON
    if "C4" in name:
        assert cfg.MODEL.ROI_HEADS.NAME == "Res5ROIHeadsExtraNorm"
        assert (cfg.MODEL.RPN.PRE_NMS_TOPK_TEST, cfg.MODEL.RPN.POST_NMS_TOPK_TEST) == (6000, 1000)
    else:
        assert (cfg.MODEL.FPN.NORM, cfg.MODEL.ROI_BOX_HEAD.NORM) == ("SyncBN", "")
        assert cfg.MODEL.ROI_MASK_HEAD.NORM == ""


def test_paper_recipes_run_in_detectron2s_own_data_sets():
    for name in ("coco_R50_FPN_1x", "voc_0712_R50_C4_24k"):
        cfg, notes = TransferTrainer.effective_config(load(ROOT / f"transfer/{name}.yaml"), 1)
        assert cfg.MODEL.RESNETS.NORM == "BN"
        assert any("MODEL.RESNETS.NORM: SyncBN -> BN" in note for note in notes)
