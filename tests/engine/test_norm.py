"""SyncBN in configs, and BN statistics over processes."""

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.layers import NaiveSyncBatchNorm
from detectron2.utils import comm
from support import run_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moco_d2.engine.norm import resolve_norms
from moco_d2.modeling.batch_norm import average_running_statistics_


def config():
    cfg = get_cfg()
    cfg.MODEL.RESNETS.NORM = "SyncBN"
    cfg.MODEL.FPN.NORM = "nnSyncBN"
    cfg.MODEL.ROI_BOX_HEAD.NORM = "SyncBN"
    cfg.MODEL.ROI_MASK_HEAD.NORM = "naiveSyncBN"
    cfg.MODEL.SEM_SEG_HEAD.NORM = "GN"
    return cfg


def norms_of(cfg):
    model = cfg.MODEL
    nodes = (model.RESNETS, model.FPN, model.ROI_BOX_HEAD, model.ROI_MASK_HEAD, model.SEM_SEG_HEAD)
    return [node.NORM for node in nodes]


@pytest.mark.parametrize(
    "world_size, has_cuda, expected, words",
    [
        (1, False, ["BN", "BN", "BN", "naiveSyncBN", "GN"], "SyncBN -> BN (the same with one"),
        (1, True, ["BN", "BN", "BN", "naiveSyncBN", "GN"], "process, all 16 images)"),
        (2, False, ["naiveSyncBN"] * 4 + ["GN"], "SyncBN -> naiveSyncBN (2 processes without GPUs"),
        (8, True, ["SyncBN", "nnSyncBN", "SyncBN", "naiveSyncBN", "GN"], None),
    ],
)
def test_syncbn_becomes_what_the_hardware_can_run(world_size, has_cuda, expected, words):
    cfg = config()
    lines = resolve_norms(cfg, world_size, has_cuda)
    assert norms_of(cfg) == expected
    names = ["MODEL.FPN.NORM", "MODEL.RESNETS.NORM", "MODEL.ROI_BOX_HEAD.NORM"] if words else []
    assert sorted(line.split(": ")[0] for line in lines) == names
    assert all(words in line for line in lines)
    assert resolve_norms(cfg, world_size, has_cuda) == []


def test_bn_over_a_part_of_the_batch_is_pointed_out():
    cfg = get_cfg()
    cfg.MODEL.RESNETS.NORM = "BN"
    (line,) = resolve_norms(cfg, 8, True)
    assert cfg.MODEL.RESNETS.NORM == "BN"
    assert "MODEL.RESNETS.NORM: BN has statistics of the 2 images" in line and "all 16" in line
    assert resolve_norms(cfg, 1, True) == []


def test_other_norms_are_left_alone():
    cfg = get_cfg()
    before = cfg.dump()
    assert resolve_norms(cfg, 2, False) == []
    assert cfg.dump() == before


def _two_processes(path):
    # The fact that the replacement rests on.
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        DistributedDataParallel(nn.SyncBatchNorm(3))
    rank = comm.get_rank()
    norms = [nn.BatchNorm2d(2), NaiveSyncBatchNorm(3), nn.BatchNorm2d(2).eval()]
    model = nn.ModuleList(norms)
    for i, norm in enumerate(norms):
        norm.running_mean.fill_(10.0 * i + rank)
        norm.running_var.fill_(20.0 * i + 3 * rank)
    average_running_statistics_(model)
    torch.save(dict(model.named_buffers()), f"{path}/{rank}.pt")


def test_statistics_become_their_mean_over_processes(tmp_path):
    run_processes(_two_processes, 2, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for i, width in ((0, 2), (1, 3)):
        for buffers in (first, second):
            assert buffers[f"{i}.running_mean"].tolist() == [10.0 * i + 0.5] * width
            assert buffers[f"{i}.running_var"].tolist() == [20.0 * i + 1.5] * width
    # A norm in eval mode is frozen.
    assert second["2.running_mean"].tolist() == [21.0, 21.0]
