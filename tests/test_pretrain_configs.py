"""Every pretraining config: it runs, made small, on the built-in data, and its export loads into a
detector. A new file is tested by being there."""

import re
from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import build_model

from moco_d2 import add_moco_config
from moco_d2.checkpoint import (
    apply_input_convention,
    convert,
    load_detector_weights_,
    read_input_convention,
)
from moco_d2.data.synthetic import SETS, render_demo_data
from moco_d2.engine.base import BaseTrainer
from moco_d2.engine.images import training_images
from moco_d2.engine.setup import trainer_of
from moco_d2.engine.transfer import TransferTrainer

ROOT = Path(__file__).parents[1] / "configs"


def load(path: Path) -> CfgNode:
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_file(str(path))
    return cfg


CONFIGS = [
    path
    for path in sorted([*ROOT.glob("*.yaml"), *ROOT.glob("pretrain/*.yaml"), *ROOT.glob("demo/*")])
    if not path.stem.startswith("Base-") and trainer_of(load(path)) is not TransferTrainer
]
# What makes a config small. What is stated here of a method's own numbers only shortens it.
SMALL = {
    "MODEL.DEVICE": "cpu",
    "MODEL.CLASSIFIER.RANDOM_BACKBONE": True,  # there are no weights to start from
    "MODEL.MOCO.DIM": 16,
    "MODEL.MOCO.MLP_DIM": 32,
    "MODEL.MOCO.QUEUE_SIZE": 12,
    "DATASETS.TRAIN": ("moco_demo_objects_train",),
    "DATASETS.TEST": (),
    "DATALOADER.NUM_WORKERS": 0,
    "INPUT.VIEWS.SIZE": 32,
    "SOLVER.IMS_PER_BATCH": 8,
    "SOLVER.EPOCHS": 0,
    "SOLVER.MAX_ITER": 2,
    "SOLVER.STEPS": (),
    "SOLVER.WARMUP_ITERS": 0,
    "SOLVER.WARMUP_EPOCHS": 0.0,
    "SOLVER.AMP.ENABLED": False,
}
# By the backbone: the least that the demo's detectors, or the like, can be built on.
SMALL_BACKBONES = {
    "build_resnet_backbone": {
        "MODEL.RESNETS.DEPTH": 18,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 64,
        "MODEL.RESNETS.OUT_FEATURES": ["res4"],
    },
    "build_vit_backbone": {
        "MODEL.VIT.EMBED_DIM": 48,
        "MODEL.VIT.DEPTH": 2,
        "MODEL.VIT.NUM_HEADS": 4,
        "MODEL.VIT.PATCH_SIZE": 16,
        "MODEL.VIT.IMG_SIZE": 32,
    },
}
DETECTORS = {
    "build_resnet_backbone": "demo/scenes_faster_rcnn_R18_FPN.yaml",
    "build_vit_backbone": "transfer/coco_ViT_B_SFP.yaml",
}


def small(path: Path, output: Path) -> CfgNode:
    cfg = load(path)
    options = {**SMALL, **SMALL_BACKBONES[cfg.MODEL.BACKBONE.NAME], "OUTPUT_DIR": str(output)}
    if cfg.MODEL.BN_GROUP_SIZE:
        options["MODEL.BN_GROUP_SIZE"] = 4
    cfg.merge_from_list([item for pair in options.items() for item in pair])
    return cfg


@pytest.fixture(scope="module")
def built_in_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    sizes = {**dict.fromkeys(SETS, 0), "objects_train": 24, "objects_val": 12}
    render_demo_data(str(folder / "moco_demo"), "coco", sizes, workers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DETECTRON2_DATASETS", str(folder))
        training_images.cache_clear()  # of a set of the same name elsewhere
        yield folder
        training_images.cache_clear()


def detector_of(name: str, convention: dict) -> torch.nn.Module:
    cfg = load(ROOT / DETECTORS[name])
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.RESNETS.NORM = cfg.MODEL.FPN.NORM = "BN"
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = cfg.MODEL.FPN.OUT_CHANNELS = 16
    if name == "build_vit_backbone":
        small_vit = {**SMALL_BACKBONES[name], "MODEL.VIT.WINDOW_BLOCKS": ()}
        cfg.merge_from_list([item for pair in small_vit.items() for item in pair])
    apply_input_convention(cfg, convention)
    return build_model(cfg)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_two_iterations_and_an_export_that_loads_into_a_detector(path, built_in_data, tmp_path):
    cfg = small(path, tmp_path)
    trainer: BaseTrainer = trainer_of(cfg)(cfg)
    trainer.resume_or_load(resume=False)
    trainer.train()
    assert trainer.iter == 2
    assert all(p.isfinite().all() for p in trainer.model.parameters())

    exported = str(tmp_path / "exported.pkl")
    report = convert(str(tmp_path / "model_final.pth"), exported)
    assert report.exported == report.expected
    detector = detector_of(cfg.MODEL.BACKBONE.NAME, read_input_convention(exported))
    # It raises unless every tensor of the backbone is filled and none left over.
    assert load_detector_weights_(detector, exported).loaded > 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_configs_say_what_they_are(path):
    """A comment first, with the published number or that there is none; a folder of its own."""
    comment = " ".join(path.read_text().partition("_BASE_:")[0].replace("#", " ").split())
    assert path.read_text().startswith("#")
    assert re.search(r"Published[:,]|[Nn]o published number", comment)
    outputs = [load(other).OUTPUT_DIR for other in CONFIGS if other != path]
    assert load(path).OUTPUT_DIR not in outputs
