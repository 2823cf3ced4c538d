"""Batch norm in transfer: what the hardware can run, with statistics equal on all processes."""

import torch
from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.utils import comm
from fvcore.nn.precise_bn import get_bn_modules
from torch import nn

from moco_d2.engine.distributed import all_reduce_mean_

# torch's SyncBatchNorm, under both of detectron2's names for it. It needs GPUs.
SYNCHRONISED = ("SyncBN", "nnSyncBN")


def resolve_norms(cfg: CfgNode, world_size: int, has_cuda: bool) -> list[str]:
    """Replace synchronised BN everywhere in a config, in place, where it cannot run.

    With several GPUs it stays. Several processes without GPUs get detectron2's naiveSyncBN, which
    gloo runs; one process gets BN, which is the same there. Other norms are left alone.

    Args:
        cfg: not frozen. Every key named NORM is looked at, however deep.
        world_size: number of processes.
        has_cuda: whether the model runs on GPUs.

    Returns:
        one line for each key that changed.
    """
    if world_size > 1 and has_cuda:
        return []
    new, why = (
        ("BN", "the same with one process")
        if world_size == 1
        else ("naiveSyncBN", f"{world_size} processes without GPUs")
    )
    return _replace_(cfg, "", new, why)


def _replace_(node: CfgNode, path: str, new: str, why: str) -> list[str]:
    lines = []
    for key, value in node.items():
        if isinstance(value, CfgNode):
            lines += _replace_(value, f"{path}{key}.", new, why)
        elif key == "NORM" and value in SYNCHRONISED:
            node[key] = new
            lines.append(f"{path}{key}: {value} -> {new} ({why})")
    return lines


class AgreeOnStatistics(HookBase):
    """Gives all processes the same BN running statistics before a checkpoint and an evaluation.

    They differ after PreciseBN, which weighs each batch by its size, and with norms that are not
    synchronised. Put it before the hooks that checkpoint and evaluate.
    """

    def __init__(self, model: nn.Module, *periods: int):
        """
        Args:
            model: a model in training mode, in DDP or not.
            periods: of checkpoints and evaluations, in iterations; 0: only after the last one.
        """
        self._model = model
        self._periods = [period for period in periods if period > 0]

    def after_step(self):
        done = self.trainer.iter + 1
        if done == self.trainer.max_iter or any(done % period == 0 for period in self._periods):
            average_statistics_(self._model)


@torch.no_grad()
def average_statistics_(model: nn.Module) -> None:
    """Make the running statistics of all BN layers in training mode their mean over processes."""
    layers = get_bn_modules(model)
    if not layers or comm.get_world_size() == 1:
        return
    buffers = [b for layer in layers for b in (layer.running_mean, layer.running_var)]
    flat = all_reduce_mean_(torch.cat(buffers))
    for buffer, mean in zip(buffers, flat.split([len(b) for b in buffers]), strict=True):
        buffer.copy_(mean)
