"""How much memory a process has, on its GPU or of the machine, in bytes."""

import os
import re
from pathlib import Path

import torch
from detectron2.utils import comm

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MEMINFO = Path("/proc/meminfo")


def total_memory(device: str) -> int:
    """That of the GPU, or this process's share of what the machine or its container has."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _CGROUP_LIMIT.is_file() and (limit := _CGROUP_LIMIT.read_text().strip()).isdigit():
        there = min(there, int(limit))  # a container's share of the machine
    return there // comm.get_local_size()


def free_memory(device: str) -> int:
    """What nobody uses now of :func:`total_memory`; all of it where the system does not say."""
    if device.startswith("cuda"):
        with torch.cuda.device(device):  # mem_get_info itself does not take "cuda"
            return torch.cuda.mem_get_info()[0]
    there = total_memory(device)
    if _MEMINFO.is_file():
        kilobytes = re.search(r"MemAvailable: +(\d+) kB", _MEMINFO.read_text())[1]
        there = min(there, 1024 * int(kilobytes))
    return there
