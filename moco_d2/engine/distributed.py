"""Several processes: launching them, DDP that also works on CPU, collectives on tensors."""

import functools
import socket
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from detectron2.utils import comm
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moco_d2.errors import UserError

TIMEOUT = timedelta(minutes=30)


def launch(
    main: Callable,
    num_processes: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str = "auto",
    device: str = "cuda",
    args: tuple = (),
) -> None:
    """Run `main(*args)` in `num_processes` processes on each of `num_machines` machines.

    Unlike detectron2's own, it follows the device that training runs on: gloo for CPU even on a
    machine with GPUs, NCCL for CUDA.

    Args:
        num_processes: per machine. One per GPU on CUDA.
        dist_url: "tcp://host:port" of machine 0, or "auto" on a single machine.
        device: MODEL.DEVICE.
    """
    world_size = num_machines * num_processes
    if world_size == 1:
        main(*args)
        return
    if dist_url == "auto":
        if num_machines > 1:
            raise UserError(
                "--dist-url auto works on one machine; give tcp://host:port of machine 0"
            )
        dist_url = f"tcp://127.0.0.1:{_free_port()}"
    worker_args = (main, world_size, num_processes, machine_rank, dist_url, device, args)
    mp.start_processes(_worker, nprocs=num_processes, args=worker_args, daemon=False)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _worker(local_rank, main, world_size, num_processes, machine_rank, dist_url, device, args):
    on_gpu = device.startswith("cuda")
    dist.init_process_group(
        backend="nccl" if on_gpu else "gloo",
        init_method=dist_url,
        world_size=world_size,
        rank=machine_rank * num_processes + local_rank,
        timeout=TIMEOUT,
    )
    comm.create_local_process_group(num_processes)
    if on_gpu:
        torch.cuda.set_device(local_rank)
    else:
        # Processes share the cores; each with all of them is slower than one alone.
        torch.set_num_threads(max(1, torch.get_num_threads() // num_processes))
    comm.synchronize()
    # The group is left to the end of the process: destroying it waits for peers, who may be gone.
    main(*args)


def create_ddp_model(model: nn.Module) -> nn.Module:
    """Wrap a model in DDP when there are several processes, after making it equal everywhere.

    detectron2's own names a GPU always, so that it fails on CPU, and leaves buffers as each
    process initialised them, so that every process would have a queue of its own.
    """
    if comm.get_world_size() == 1:
        return model
    broadcast_(model)
    device = next(model.parameters()).device
    device_ids = [comm.get_local_rank()] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, broadcast_buffers=False)


@torch.no_grad()
def broadcast_(model: nn.Module) -> None:
    """Give every process the parameters and buffers of process 0."""
    if comm.get_world_size() > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)


def all_gather_rows(x: Tensor) -> Tensor:
    """(n, ...) on each process, the same n -> (W n, ...) in order of rank on all. No gradient."""
    world_size = comm.get_world_size()
    if world_size == 1:
        return x
    out = x.new_empty((world_size * len(x), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def all_reduce_mean_(x: Tensor) -> Tensor:
    """Replace x by its mean over the processes. (gloo of torch 2.3 has no AVG.)"""
    if comm.get_world_size() > 1:
        dist.all_reduce(x)
        x.div_(comm.get_world_size())
    return x


@functools.cache
def neighbour_group(span: int) -> dist.ProcessGroup | None:
    """The process group of this process and its neighbours, `span` consecutive ranks each.

    A collective: every process must call it, with the same `span`. None stands for all.
    """
    world_size, rank = comm.get_world_size(), comm.get_rank()
    if span == world_size:
        return None
    mine = None
    for first in range(0, world_size, span):
        group = dist.new_group(range(first, first + span))
        if first <= rank < first + span:
            mine = group
    return mine
