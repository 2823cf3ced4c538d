"""What several tests share: processes, small encoders, small configs."""

import numpy as np
import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone
from torch import nn

from moco_d2 import add_moco_config
from moco_d2.engine.distributed import launch
from moco_d2.engine.environment import find_job


def run_processes(function, num_processes: int, *args) -> None:
    """Run a top-level function of a test file in gloo processes of one thread each."""
    launch(_single_threaded, find_job(num_processes), "cpu", (function, *args))


def _single_threaded(function, *args) -> None:
    torch.set_num_threads(1)
    function(*args)


class TinyBackbone(Backbone):
    """Two convolutions with norms: the least that has BN statistics at two depths."""

    def __init__(self, channels: int = 8, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.norm1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = norm(channels)
        self.channels = channels

    def forward(self, x):
        x = torch.relu(self.norm1(self.conv1(x)))
        return {"out": torch.relu(self.norm2(self.conv2(x)))}

    def output_shape(self):
        return {"out": ShapeSpec(channels=self.channels, stride=2)}


def tiny_pretrain_config(
    output_dir="", config: str = "configs/moco_pretrain.yaml", **overrides
) -> CfgNode:
    """A config, MoCo v2's, made R-18 at 32 px on the CPU; overrides as `MODEL__MOCO__DIM=32`."""
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_file(config)
    options = {
        "MODEL.DEVICE": "cpu",
        "MODEL.RESNETS.DEPTH": 18,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 64,
        "MODEL.RESNETS.OUT_FEATURES": ["res3"],
        "MODEL.BN_GROUP_SIZE": 4,
        "MODEL.MOCO.DIM": 16,
        "MODEL.MOCO.QUEUE_SIZE": 40,
        "INPUT.VIEWS.SIZE": 32,
        "SOLVER.IMS_PER_BATCH": 16,
        "SOLVER.EPOCHS": 0,
        "SOLVER.MAX_ITER": 4,
        "DATALOADER.NUM_WORKERS": 0,
        "SEED": 7,
        "LOG_PERIOD": 1,
        "OUTPUT_DIR": str(output_dir),
    }
    options.update({key.replace("__", "."): value for key, value in overrides.items()})
    cfg.merge_from_list([item for pair in options.items() for item in pair])
    return cfg


def tiny_vit_options() -> dict:
    """What makes :func:`tiny_pretrain_config` one of a small ViT."""
    return {
        "MODEL__BACKBONE__NAME": "build_vit_backbone",
        "MODEL__VIT__EMBED_DIM": 48,
        "MODEL__VIT__DEPTH": 2,
        "MODEL__VIT__NUM_HEADS": 4,
        "MODEL__VIT__IMG_SIZE": 32,
    }


def random_views(count: int, size: int, seed: int) -> list[torch.Tensor]:
    """Two uint8 (N, 3, H, W) views: the second is the first with noise."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 256, (count, 3, size, size))
    second = np.clip(first + rng.integers(-40, 41, first.shape), 0, 255)
    return [torch.from_numpy(v.astype(np.uint8)) for v in (first, second)]


def sincos_reference(side: int, channels: int) -> np.ndarray:
    """MoCo v3's positions, written out from the paper's formula: rows first, each of the two
    coordinates with its sines, then its cosines. float64 (side * side, channels)."""
    quarter = channels // 4
    table = np.zeros((side, side, channels))
    for row in range(side):
        for column in range(side):
            for i in range(quarter):
                omega = 1 / 10000 ** (i / quarter)
                table[row, column, i] = np.sin(row * omega)
                table[row, column, quarter + i] = np.cos(row * omega)
                table[row, column, 2 * quarter + i] = np.sin(column * omega)
                table[row, column, 3 * quarter + i] = np.cos(column * omega)
    return table.reshape(-1, channels)
