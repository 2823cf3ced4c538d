"""Every task of configs/transfer trains and is evaluated, on built-in data in its own layout."""

import json
import os
import pickle
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from detectron2.utils import comm
from jobs import run_on_processes
from weights import moco_checkpoint, vit_checkpoint

from moco_d2 import add_moco_config
from moco_d2.checkpoint import convert
from moco_d2.data.synthetic import render_demo_data
from moco_d2.data.synthetic.figures import KEYPOINT_OKS_SIGMAS
from moco_d2.data.synthetic.sets import SETS
from moco_d2.engine import setup

TASKS = {
    path.stem: path
    for path in sorted((Path(__file__).parents[2] / "configs/transfer").glob("*.yaml"))
    if not path.name.startswith("Base-") and "densepose" not in path.name
}
# Sets of a task -> the built-in ones in the same layout, their classes, the metric of the task.
DATA = {
    "coco_2017": ("scenes", 12, "segm/AP"),
    "keypoints_coco_2017": ("figures", 1, "keypoints/AP"),
    "lvis_v0.5": ("scenes_lvis", 12, "segm/AP"),
    "voc_2007": ("scenes_voc", 12, "bbox/AP"),
    "voc_2012_sem_seg": ("scenes_voc_sem_seg", 13, "sem_seg/mIoU"),
    "cityscapes_fine_instance_seg": ("scenes_cityscapes_instance", 8, "segm/AP"),
    "cityscapes_fine_sem_seg": ("scenes_cityscapes_sem_seg", 19, "sem_seg/mIoU"),
}
# One task of each family, for two processes.
FAMILIES = (
    "cityscapes_instance_R50_FPN_24k",
    "coco_R50_FPN_1x_4conv1fc",
    "coco_ViT_B_SFP",
    "coco_keypoint_R50_FPN_2x",
    "lvis_v0.5_R50_FPN_2x",
    "voc_0712_R50_C4_24k",
    "voc_0712_R50_DC5_24k",
    "voc_semseg_FCN_R50_30k",
)
WIDTH = 8  # of the first stage of the R-50
# What makes a ViT, and its images, small.
SMALL_VIT = {
    "MODEL.VIT.EMBED_DIM": 48,
    "MODEL.VIT.DEPTH": 2,
    "MODEL.VIT.NUM_HEADS": 4,
    "MODEL.VIT.IMG_SIZE": 32,
    "MODEL.VIT.WINDOW_SIZE": 2,
    "MODEL.VIT.WINDOW_BLOCKS": (0,),
    "MODEL.VIT.SQUARE_PAD": 64,
    "INPUT.SCALE_JITTER": 64,
    "INPUT.MAX_SIZE_TEST": 64,
}
# Tensors of a backbone that training must move.
TRAINED = {
    "r50": ("stem.conv1.weight", "stem.conv1.norm.bias", "res5.2.conv3.weight"),
    "vit": ("patch_embed.proj.weight", "pos_embed", "blocks.1.mlp.fc2.weight"),
}


@pytest.fixture(scope="session")
def datasets(tmp_path_factory):
    """A folder for DETECTRON2_DATASETS: a few pictures in every layout."""
    folder = tmp_path_factory.mktemp("datasets")
    sizes = dict.fromkeys(SETS, 0)
    # Every class is in the test set, or VOC's mean over classes is NaN.
    sizes |= {"scenes_train": 6, "scenes_test": 12, "figures_train": 4, "figures_test": 2}
    for layout in ("coco", "voc", "lvis", "cityscapes"):
        render_demo_data(str(folder / "moco_demo"), layout, sizes, workers=1)
    return folder


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """The backbones of a narrow MoCo R-50 and a small MoCo ViT, exported, by `kind_of`."""
    folder = tmp_path_factory.mktemp("exported")
    for kind, checkpoint in (("r50", moco_checkpoint(50, width=WIDTH)), ("vit", vit_checkpoint())):
        torch.save(checkpoint, folder / f"{kind}.pth")
        convert(str(folder / f"{kind}.pth"), str(folder / f"{kind}.pkl"))
    return {kind: str(folder / f"{kind}.pkl") for kind in TRAINED}


def kind_of(name: str) -> str:
    """The kind of a task's backbone."""
    return "vit" if "ViT" in name else "r50"


@pytest.fixture(autouse=True)
def surroundings(datasets, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets))
    torch.set_num_threads(1)


def data_of(cfg) -> tuple[str, int, str]:
    """The row of DATA that a config's test set belongs to."""
    return DATA[max((k for k in DATA if cfg.DATASETS.TEST[0].startswith(k)), key=len)]


def small(name: str, output, weights: str, processes: int):
    """The effective config of a task's own file, with all that costs time made small."""
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_file(str(TASKS[name]))
    data, classes, _ = data_of(cfg)
    options = {
        "DATASETS.TRAIN": (f"moco_demo_{data}_train",),
        "DATASETS.TEST": (f"moco_demo_{data}_test",),
        "DATALOADER.NUM_WORKERS": 0,
        "INPUT.MIN_SIZE_TRAIN": (64,),
        "INPUT.MIN_SIZE_TEST": min(64, cfg.INPUT.MIN_SIZE_TEST),
        "INPUT.SEM_SEG.CROP_SIZE": min(65, cfg.INPUT.SEM_SEG.CROP_SIZE),
        "MODEL.DEVICE": "cpu",
        "MODEL.WEIGHTS": weights,
        "MODEL.RESNETS.STEM_OUT_CHANNELS": WIDTH,
        "MODEL.RESNETS.WIDTH_PER_GROUP": WIDTH,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 4 * WIDTH,
        "MODEL.FPN.OUT_CHANNELS": 16,
        "MODEL.RPN.POST_NMS_TOPK_TRAIN": 20,
        "MODEL.RPN.POST_NMS_TOPK_TEST": 4,
        "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 8,
        "MODEL.ROI_HEADS.NUM_CLASSES": classes,
        "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,
        "MODEL.ROI_BOX_HEAD.FC_DIM": 16,
        "MODEL.ROI_BOX_HEAD.CONV_DIM": 16,
        "MODEL.ROI_MASK_HEAD.CONV_DIM": 16,
        "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS": (16,),
        "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS": len(KEYPOINT_OKS_SIGMAS),
        "MODEL.SEM_SEG_HEAD.NUM_CLASSES": classes,
        "MODEL.SEM_SEG_HEAD.CONVS_DIM": 16,
        "OUTPUT_DIR": str(output),
        "SEED": 1,
        "SOLVER.WARMUP_ITERS": 0,
        "TEST.DETECTIONS_PER_IMAGE": 4,
        "TEST.KEYPOINT_OKS_SIGMAS": KEYPOINT_OKS_SIGMAS if cfg.MODEL.KEYPOINT_ON else (),
        "LOG_PERIOD": 1,
        **(SMALL_VIT if kind_of(name) == "vit" else {}),
    }
    opts = [str(item) for pair in options.items() for item in pair]
    args = Namespace(config_file=str(TASKS[name]), opts=opts, eval_only=False, resume=False)
    cfg, _ = setup.setup(args, processes)
    # After the recipe was scaled: two steps on any number of processes.
    cfg.defrost()
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS, cfg.TEST.PRECISE_BN.NUM_ITER = 2, (), 1
    cfg.freeze()
    return cfg


def run(name: str, output: Path, weights: str = "", processes: int = 1):
    """Train a task, from weights that must fill the whole backbone, and evaluate it."""
    output.mkdir(parents=True, exist_ok=True)
    cfg = small(name, output, weights, processes)
    trainer = setup.trainer_of(cfg)(cfg)
    trainer.resume_or_load(resume=False)
    before = {n: t.clone() for n, t in trainer.model.state_dict().items()}
    trainer.train()
    return trainer.model, before


def check_metrics(name: str, output: Path) -> None:
    """Two finite losses, and the task's metric; without training, hardly more than 0."""
    lines = [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]
    losses = [line["total_loss"] for line in lines if "total_loss" in line]
    assert len(losses) == 2 and all(np.isfinite(losses))
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_file(str(TASKS[name]))
    value = next(line[data_of(cfg)[2]] for line in lines if data_of(cfg)[2] in line)
    assert 0 <= value < 50


@pytest.mark.parametrize("name", TASKS)
def test_a_task_runs_from_random_and_from_exported_weights(exported, tmp_path, name):
    kind = kind_of(name)
    weights = pickle.loads(Path(exported[kind]).read_bytes())["model"]
    for path, output in (("", tmp_path / "random"), (exported[kind], tmp_path / "exported")):
        model, before = run(name, output, path)
        assert all(p.requires_grad for p in model.parameters())
        after = model.state_dict()
        for last in TRAINED[kind]:
            (name_in_model,) = (n for n in after if n.endswith(last))
            given = torch.from_numpy(weights[last])
            assert torch.equal(before[name_in_model], given) == bool(path)
            assert not torch.equal(after[name_in_model], before[name_in_model])
        check_metrics(name, output)


def _two_processes(names: list[str], datasets: Path, folder: Path, weights: dict) -> None:
    os.environ["DETECTRON2_DATASETS"] = str(datasets)
    for name in names:
        model, _ = run(name, folder / name, weights[kind_of(name)], processes=2)
        torch.save(model.module.state_dict(), folder / f"{name}.{comm.get_rank()}.pt")


def test_a_task_of_each_family_runs_on_two_processes(datasets, exported, tmp_path):
    names = [name for name in FAMILIES if name in TASKS]
    run_on_processes(_two_processes, 2, names, datasets, tmp_path, exported)
    for name in names:
        check_metrics(name, tmp_path / name)
        first, second = (torch.load(tmp_path / f"{name}.{rank}.pt") for rank in (0, 1))
        for key, tensor in first.items():
            torch.testing.assert_close(tensor, second[key], rtol=1e-5, atol=1e-5, msg=key)
