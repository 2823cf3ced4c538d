"""Runs on data of other kinds: any source gives the same losses, and 16-bit gray trains."""

import json
import os
import tarfile

import cv2
import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.modeling import build_backbone
from support import tiny_pretrain_config

from moco_d2.checkpoint import convert
from moco_d2.engine.trainer import PretrainTrainer


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Twenty smooth random pictures."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for i in range(20):
        coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / f"{i:02d}.jpg"), cv2.resize(coarse, (64, 48)))
    return folder


def losses(folder, **overrides) -> list[float]:
    trainer = PretrainTrainer(tiny_pretrain_config(folder, SOLVER__MAX_ITER=3, **overrides))
    trainer.train()
    lines = (folder / "metrics.json").read_text().splitlines()
    return [r["loss_contrastive"] for r in map(json.loads, lines) if "loss_contrastive" in r]


def test_folder_list_shards_and_coco_set_give_the_same_losses(images, tmp_path):
    names = sorted(os.listdir(images))
    (tmp_path / "list.txt").write_text("\n".join(str(images / name) for name in names))
    for shard in range(2):
        with tarfile.open(tmp_path / f"s-{shard}.tar", "w") as file:
            for name in names[10 * shard : 10 * shard + 10]:
                file.add(images / name, name)
    records = [
        {"id": i, "file_name": name, "height": 48, "width": 64} for i, name in enumerate(names)
    ]
    annotations = {"images": records, "categories": [{"id": 1, "name": "x"}], "annotations": []}
    (tmp_path / "coco.json").write_text(json.dumps(annotations))
    register_coco_instances("test_run_coco", {}, str(tmp_path / "coco.json"), str(images))
    sources = {
        "folder": str(images),
        "list": str(tmp_path / "list.txt"),
        "shards": str(tmp_path / "s-{0..1}.tar"),
        "coco": "test_run_coco",
    }
    try:
        found = {
            kind: losses(tmp_path / kind, DATASETS__TRAIN=(name,)) for kind, name in sources.items()
        }
    finally:
        DatasetCatalog.remove("test_run_coco")
        MetadataCatalog.pop("test_run_coco", None)
    assert len(found["folder"]) == 3
    for kind in sources:
        assert found[kind] == found["folder"], kind


def test_gray_tiffs_of_sixteen_bits_train_and_export(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "scans").mkdir()
    for i in range(20):
        coarse = rng.integers(0, 4096, (6, 8)).astype(np.uint16)
        cv2.imwrite(str(tmp_path / "scans" / f"{i:02d}.tif"), cv2.resize(coarse, (64, 48)))
    values = losses(
        tmp_path / "run",
        DATASETS__TRAIN=(str(tmp_path / "scans"),),
        MODEL__PIXEL_MEAN=[128.0],
        MODEL__PIXEL_STD=[60.0],
        INPUT__DEEP_RANGE=(0, 4095),
    )
    assert len(values) == 3 and np.isfinite(values).all()
    convert(str(tmp_path / "run/model_final.pth"), str(tmp_path / "gray.pkl"))
    exported = np.load(tmp_path / "gray.pkl", allow_pickle=True)
    assert exported["input"]["pixel_mean"] == [128.0]
    cfg = get_cfg()
    cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD = [128.0], [60.0]
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
    cfg.MODEL.RESNETS.NORM = "BN"
    backbone = build_backbone(cfg)
    stem = torch.as_tensor(exported["model"]["stem.conv1.weight"])
    assert stem.shape == backbone.state_dict()["stem.conv1.weight"].shape == (64, 1, 7, 7)
