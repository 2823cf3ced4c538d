"""The machine that cells run on: what it is, and how runs at the same time share it."""

import os
import platform
from pathlib import Path
from typing import Any

import detectron2
import torch

import moco_d2
from moco_d2.errors import UserError


def environment() -> dict[str, Any]:
    """Machine and versions, for the record."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": processor(),
        "cores": cores(),
        "gpus": ", ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus))) or "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "detectron2": detectron2.__version__,
        "moco_d2": moco_d2.__version__,
    }


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def places(at_once: int, num_gpus: int, on_gpu: bool) -> list[dict[str, str]]:
    """Environment variables of the runs that go on at the same time: each has GPUs of its own;
    without GPUs, each process has one thread, since several of one thread beat one of several.

    Args:
        num_gpus: of each run; processes on a CPU.
        on_gpu: whether the runs' MODEL.DEVICE is a GPU.

    Raises:
        UserError: there are not so many GPUs.
    """
    if at_once < 1:
        raise UserError(f"--jobs is {at_once}; it must be at least 1")
    if not on_gpu:
        return [{"OMP_NUM_THREADS": os.getenv("OMP_NUM_THREADS", "1")}] * at_once
    count = torch.cuda.device_count()
    if at_once * num_gpus > count:
        raise UserError(
            f"--jobs {at_once} runs of --num-gpus {num_gpus} need {at_once * num_gpus} GPUs, and "
            f"there are {count}: lower one of them"
        )
    visible = os.getenv("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices = visible.split(",")
    shares = [devices[i * num_gpus : (i + 1) * num_gpus] for i in range(at_once)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
