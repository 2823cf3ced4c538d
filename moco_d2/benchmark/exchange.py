"""The shuffle of images over processes, beside the all-gather of floats that it replaces."""

import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from detectron2.utils import comm

from moco_d2.benchmark.timing import Timing, ratio, time_in_turns, timing_table
from moco_d2.engine.distributed import launch
from moco_d2.engine.environment import find_job
from moco_d2.modeling.shuffle import shuffle_images, shuffle_permutation

_OURS, _REFERENCE = "bytes, all to all", "floats, all-gather"


def measure_shuffle(
    repeats: int, *, processes: int, batch: int, size: int
) -> tuple[str, dict[str, float]]:
    """Time the exchange of one view's images between processes on CPUs.

    Args:
        processes: how many.
        batch: images of each.
        size: side of the images.

    Returns:
        a table, and the ratio ``vs_float_all_gather``.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "seconds.npz")
        launch(_exchange, find_job(processes), "cpu", (repeats, batch, size, path))
        with np.load(path) as seconds:
            timings = {name: Timing(name, seconds[name]) for name in (_OURS, _REFERENCE)}
    table = timing_table(timings, f"exchange of {processes} x {batch}", _OURS)
    return table, {"vs_float_all_gather": ratio(timings, _REFERENCE, _OURS)}


def _exchange(repeats: int, batch: int, size: int, path: str) -> None:
    """What each process runs; the first writes the times."""
    torch.set_num_threads(1)
    rank, world_size = comm.get_rank(), comm.get_world_size()
    images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8)
    floats = images.float()

    def ours() -> None:
        shuffle_images(images, shuffle_permutation(world_size * batch, 0, 0))

    def reference() -> None:
        gathered = [torch.ones_like(floats) for _ in range(world_size)]  # as MoCo's own code
        dist.all_gather(gathered, floats)
        order = torch.randperm(world_size * batch)
        dist.broadcast(order, src=0)
        torch.cat(gathered)[order.view(world_size, -1)[rank]]

    timings = time_in_turns({_OURS: ours, _REFERENCE: reference}, repeats=repeats)
    if rank == 0:
        np.savez(path, **{name: timing.seconds for name, timing in timings.items()})
