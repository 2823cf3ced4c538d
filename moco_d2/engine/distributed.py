"""Several processes: launching them, DDP that also works on CPU, collectives on tensors."""

import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from detectron2.utils import comm
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moco_d2.engine.environment import Job
from moco_d2.engine.guard import FOLLOWER_EXIT, Guard
from moco_d2.engine.signals import stop_signals
from moco_d2.errors import UserError

TIMEOUT = timedelta(minutes=30)
# How long the processes of a machine may go on after one of them has failed.
GRACE_SECONDS = 30


def launch(main: Callable, job: Job, device: str = "cuda", args: tuple = ()) -> None:
    """Run `main(*args)` in every process of a job that is this one or belongs on this machine.

    Unlike detectron2's own, it follows the device that training runs on: gloo for CPU even on a
    machine with GPUs, NCCL for CUDA. When a process fails or dies, all end, with the reason.

    Args:
        device: MODEL.DEVICE.

    Raises:
        UserError: processes that would be started here have no GPU of their own.
        ProcessRaisedException, ProcessExitedException: a process that was started here failed.
    """
    if job.world_size == 1:
        with stop_signals():
            main(*args)
    elif job.local_rank is None:
        if device.startswith("cuda"):
            _check_gpus(job.local_world_size)
        worker_args = (main, job, device, args)
        _watch(
            mp.start_processes(
                _worker, nprocs=job.local_world_size, args=worker_args, daemon=False, join=False
            )
        )
    else:
        try:
            _worker(job.local_rank, main, job, device, args)
        except Exception:
            # An orderly exit would wait for peers, who may be gone.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


def _check_gpus(wanted: int) -> None:
    there = torch.cuda.device_count()
    if wanted > there:
        raise UserError(
            f"--num-gpus is {wanted} and this machine has {there} GPU{'s' * (there != 1)}: each "
            "process needs one of its own; give fewer, or run on the CPU, whose cores they share"
        )


def _worker(local_rank: int, main: Callable, job: Job, device: str, args: tuple) -> None:
    if sys.platform == "linux":
        # Spawned processes would spawn their loader workers, too, each importing everything anew.
        multiprocessing.set_start_method("fork", force=True)
    rank, on_gpu = job.first_rank + local_rank, device.startswith("cuda")
    store = next(dist.rendezvous(job.url, rank, job.world_size, timeout=TIMEOUT))[0]
    store.set_timeout(TIMEOUT)
    code = 0
    try:
        _member(store, rank, local_rank, main, job, on_gpu, args)
    except SystemExit as end:
        code = end.code
    _leave(code)


def _member(
    store: dist.Store,
    rank: int,
    local_rank: int,
    main: Callable,
    job: Job,
    on_gpu: bool,
    args: tuple,
) -> None:
    """Run `main` as a member of the job's process group."""
    with stop_signals(), _guarded(Guard(store, job.host, rank, job.world_size)):
        dist.init_process_group(
            backend="nccl" if on_gpu else "gloo",
            store=store,
            world_size=job.world_size,
            rank=rank,
            timeout=TIMEOUT,
        )
        comm.create_local_process_group(job.local_world_size)
        if on_gpu:
            # SLURM may show each task its own GPU only.
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        else:
            # Processes share the cores; each with all of them is slower than one alone.
            torch.set_num_threads(max(1, torch.get_num_threads() // job.local_world_size))
        comm.synchronize()
        # The group is left to the end of the process: destroying it waits for peers, who may be
        # gone.
        main(*args)


def _leave(code: int | None) -> None:
    """End this process without tearing the interpreter down.

    gloo's threads may still drop the last tensors of a collective; one that does so while the
    interpreter goes takes the process down with SIGABRT.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


@contextlib.contextmanager
def _guarded(guard: Guard) -> Iterator[None]:
    """Report how the body ends to the other processes."""
    try:
        yield
    except SystemExit as end:
        error = end.__cause__
        if error is None or getattr(error, "on_all_processes", False):
            guard.close()
        else:
            guard.fail(str(error))
        raise
    except BaseException as error:
        guard.fail(traceback.format_exc(), perhaps_second_hand=isinstance(error, RuntimeError))
        raise
    guard.close()


def _watch(context: mp.ProcessContext) -> None:
    """Wait for the processes of this machine, pass signals on to them, and say who failed first."""
    running = {process.sentinel: i for i, process in enumerate(context.processes)}
    failed: list[int] = []

    def forward(number: int) -> None:
        for i in list(running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(context.processes[i].pid, number)

    def kill(_: int = 0) -> None:
        for i in list(running.values()):
            context.processes[i].kill()

    with stop_signals(forward, kill):
        while running:
            ready = connection.wait(running, GRACE_SECONDS if failed else None)
            for sentinel in ready:
                i = running.pop(sentinel)
                context.processes[i].join()
                if context.processes[i].exitcode:
                    failed.append(i)
            if not ready:
                kill()
    if failed:
        raise _cause(context, failed)


def _cause(context: mp.ProcessContext, failed: list[int]) -> mp.ProcessExitedException:
    """The exception for the process that failed of its own, of those that ended with an error."""
    codes = {i: context.processes[i].exitcode for i in failed}
    first = next((i for i in failed if codes[i] != FOLLOWER_EXIT), failed[0])
    pid, code = context.processes[first].pid, codes[first]
    if os.path.isfile(context.error_files[first]):
        with open(context.error_files[first], "rb") as f:
            trace = pickle.load(f)
        return mp.ProcessRaisedException(f"process {first} failed:\n{trace}", first, pid)
    if code > 0:
        return mp.ProcessExitedException(
            f"process {first} ended with exit code {code}", first, pid, code
        )
    name = signal.Signals(-code).name
    return mp.ProcessExitedException(
        f"process {first} ({pid}) of this machine was killed by {name}"
        + (", perhaps because memory ran out" if -code == signal.SIGKILL else ""),
        first,
        pid,
        code,
        name,
    )


@functools.cache
def control_group() -> dist.ProcessGroup | None:
    """A gloo group of all processes, for what must not wait for a GPU. None stands for all.

    A collective when it is called first.
    """
    return dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else None


def create_ddp_model(model: nn.Module) -> nn.Module:
    """Wrap a model in DDP when there are several processes, after making it equal everywhere.

    detectron2's own names a GPU always, so that it fails on CPU, and leaves buffers as each
    process initialised them, so that every process would have a queue of its own.
    """
    if comm.get_world_size() == 1:
        return model
    broadcast_(model)
    device = next(model.parameters()).device
    device_ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, broadcast_buffers=False)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, or the model."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@torch.no_grad()
def broadcast_(model: nn.Module) -> None:
    """Give every process the parameters and buffers of process 0."""
    if comm.get_world_size() > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.new_empty((comm.get_world_size() * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        # What every process's loss says of this process's rows. The sum, not the mean: DDP takes
        # the mean over processes of parameters' gradients, and would divide a second time.
        total = grad.clone()
        dist.all_reduce(total)
        return total.chunk(comm.get_world_size())[comm.get_rank()]


def all_gather_rows(x: Tensor) -> Tensor:
    """(n, ...) on each process, the same n -> (W n, ...) in order of rank on all.

    Where x takes a gradient, it gets that of the sum of all processes' losses; all must then run
    `backward`.
    """
    return x if comm.get_world_size() == 1 else _AllGatherRows.apply(x)


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
