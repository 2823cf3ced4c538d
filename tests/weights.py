"""Weight files and small data sets that tests of conversion and transfer write."""

import functools
import json

import cv2
import numpy as np
import torch
import torchvision
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone import build_resnet_backbone
from support import tiny_pretrain_config, tiny_vit_options
from torch import nn

from moco_d2.engine.identity import RunIdentity
from moco_d2.modeling.moco import MoCo

RGB = {
    "format": "RGB",
    "pixel_mean": [123.675, 116.28, 103.53],
    "pixel_std": [58.395, 57.12, 57.375],
    "stride_in_1x1": False,
}


@torch.no_grad()
def randomise_norms_(model: nn.Module) -> nn.Module:
    """Give each BN its own statistics, scale and shift, so that no mistake in them can hide."""
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_(0, 0.2)
            m.running_var.uniform_(0.5, 2)
            m.weight.uniform_(0.3, 0.9)
            m.bias.normal_(0, 0.2)
            m.num_batches_tracked.fill_(7)
    return model


@functools.cache
def torchvision_resnet(depth: int) -> nn.Module:
    return randomise_norms_(getattr(torchvision.models, f"resnet{depth}")(weights=None)).eval()


@functools.cache
def detectron2_resnet(
    depth: int, last: str = "res5", number: int = 0, width: int = 64
) -> nn.Module:
    """The `number`-th of several different networks; `width` is of the first stage."""
    cfg = get_cfg()
    cfg.MODEL.RESNETS.DEPTH = depth
    cfg.MODEL.RESNETS.WIDTH_PER_GROUP = cfg.MODEL.RESNETS.STEM_OUT_CHANNELS = width
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = width if depth < 50 else 4 * width
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False
    cfg.MODEL.RESNETS.OUT_FEATURES = [last]
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    return randomise_norms_(build_resnet_backbone(cfg, ShapeSpec(channels=3)))


def moco_checkpoint(depth: int = 18, last: str = "res5", width: int = 64) -> dict:
    """A pretraining checkpoint as MoCo's trainer writes it, with random weights."""
    state = {}
    for number, encoder in enumerate(("encoder_q", "encoder_k")):
        backbone = detectron2_resnet(depth, last, number, width).state_dict()
        state.update({f"{encoder}.backbone.{name}": t.clone() for name, t in backbone.items()})
        for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
            state[f"{encoder}.head.{name}"] = torch.rand(8)
    state["dictionary.keys"] = torch.rand(16, 8)
    state["dictionary.pointer"] = torch.tensor(4)
    state["dictionary.filled"] = torch.tensor(16)
    recipe = {
        "meta_architecture": "MoCo",
        "input": dict(RGB),
        "backbone": {
            "name": "build_resnet_backbone",
            "depth": depth,
            "num_groups": 1,
            "width_per_group": width,
            "res2_out_channels": width if depth < 50 else 4 * width,
            "stem_out_channels": width,
            "norm": "BN",
            "out_features": [last],
        },
        "dim": 8,
        "head": "mlp",
        "seed": 3,
        "epochs": 1.5,
    }
    return {"model": state, "trainer": {"iteration": 99}, "iteration": 99, "recipe": recipe}


def vit_checkpoint() -> dict:
    """The same of a small ViT."""
    cfg = tiny_pretrain_config(**tiny_vit_options())
    recipe = RunIdentity(cfg, num_images=100).state_dict()
    return {"model": MoCo(cfg).state_dict(), "iteration": 99, "recipe": recipe}


def register_tiny_coco(name: str, root, images: int = 4, size: int = 64) -> None:
    """Write `images` pictures with one bright rectangle each, of two classes, and register them."""
    rng = np.random.default_rng(0)
    content = {"images": [], "annotations": [], "categories": []}
    content["categories"] = [{"id": i + 1, "name": n} for i, n in enumerate(("flat", "tall"))]
    for i in range(images):
        w, h = (30, 16) if i % 2 == 0 else (16, 30)
        x, y = (int(v) for v in rng.integers(2, size - 32, 2))
        picture = rng.integers(0, 100, (size, size, 3)).astype(np.uint8)
        picture[y : y + h, x : x + w] = 230
        cv2.imwrite(str(root / f"{i}.png"), picture)
        content["images"].append({"id": i, "file_name": f"{i}.png", "width": size, "height": size})
        box = {"bbox": [x, y, w, h], "area": w * h, "iscrowd": 0}
        content["annotations"].append({"id": i + 1, "image_id": i, "category_id": i % 2 + 1, **box})
    (root / "instances.json").write_text(json.dumps(content))
    if name in DatasetCatalog.list():
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
    register_coco_instances(name, {}, str(root / "instances.json"), str(root))
