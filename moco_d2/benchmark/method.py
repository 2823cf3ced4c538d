"""MoCo's own work in a step: the key encoder's update, and the step over its encoders alone."""

import copy

import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.utils.events import EventStorage

from moco_d2.benchmark.timing import ratio, time_in_turns, timing_table
from moco_d2.config import add_moco_config
from moco_d2.modeling.moco import MoCo

_MOMENTUM = 0.999
_LR = 0.03


def moco_config(batch: int, device: str) -> CfgNode:
    """MoCo v2 on ResNet-50, K = 65536. `batch` images are on this process, of 256 in all."""
    cfg: CfgNode = get_cfg()
    add_moco_config(cfg)
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res5"]
    cfg.MODEL.PIXEL_STD = [58.395, 57.12, 57.375]
    cfg.MODEL.BN_GROUP_SIZE = min(batch, 32)
    cfg.MODEL.DEVICE = device
    cfg.SOLVER.IMS_PER_BATCH = 256
    return cfg


def _moco(batch: int, device: str) -> MoCo:
    return MoCo(moco_config(batch, device)).to(device).train()


def measure_key_update(repeats: int) -> tuple[str, dict[str, float]]:
    """Time the key encoder's update of a ResNet-50 beside a loop over its parameters.

    Returns:
        a table, and the ratio ``vs_loop``.
    """
    model = _moco(32, "cpu")
    queries, keys = list(model.encoder_q.parameters()), list(model.encoder_k.parameters())

    @torch.no_grad()
    def loop() -> None:
        for q, k in zip(queries, keys, strict=True):
            k.data = k.data * _MOMENTUM + q.data * (1 - _MOMENTUM)

    ours, theirs = "moco_d2", "loop over parameters"
    ways = {ours: lambda: model.update_key_encoder(_MOMENTUM), theirs: loop}
    timings = time_in_turns(ways, repeats=repeats)
    return timing_table(timings, "update", ours), {"vs_loop": ratio(timings, theirs, ours)}


def measure_step(
    repeats: int, *, batch: int, size: int, device: str
) -> tuple[str, dict[str, float]]:
    """Time a MoCo step beside its encoders' forward, backward and optimizer step alone.

    Args:
        batch: images a step.
        size: side of the views.
        device: "cpu" or "cuda".

    Returns:
        a table, and the ratio ``over_bare``.
    """
    model = _moco(batch, device)
    bare_q, bare_k = copy.deepcopy(model.encoder_q), copy.deepcopy(model.encoder_k)
    step_optimizer, bare_optimizer = (
        torch.optim.SGD(encoder.parameters(), lr=_LR, momentum=0.9, weight_decay=1e-4, foreach=True)
        for encoder in (model.encoder_q, bare_q)
    )
    shape = (batch, 3, size, size)
    views = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(2)]
    images = [model.normalise(view) for view in views]

    def moco_step() -> None:
        step_optimizer.zero_grad()
        with EventStorage():
            model({"views": views})["loss_contrastive"].backward()
        step_optimizer.step()
        model.finish_step(_MOMENTUM)
        _wait(device)

    def bare_step() -> None:
        bare_optimizer.zero_grad()
        with torch.no_grad():
            keys = bare_k(images[1])
        (bare_q(images[0]) * keys).sum().backward()
        bare_optimizer.step()
        _wait(device)

    ours, bare = "MoCo step", "encoders alone"
    timings = time_in_turns({ours: moco_step, bare: bare_step}, repeats=repeats)
    return timing_table(timings, f"step of {batch}", ours), {
        "over_bare": ratio(timings, ours, bare)
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
