"""Where a command stands in its job: by torchrun's or SLURM's environment, or its own arguments."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from moco_d2.errors import UserError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")


@dataclass(frozen=True)
class Job:
    """The processes of a job, and which of them this command is or starts.

    Attributes:
        local_world_size: processes on this machine, and on every other.
        num_machines: machines of the job.
        machine_rank: of this machine, from 0.
        local_rank: of this process on its machine, where a launcher has started it; None: this
            command starts all processes of its machine.
        url: where the processes meet, as torch.distributed takes it.
        host: the machine of process 0, as this one reaches it.
    """

    local_world_size: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    local_rank: int | None = None
    url: str = ""
    host: str = "127.0.0.1"

    @property
    def world_size(self) -> int:
        return self.local_world_size * self.num_machines

    @property
    def first_rank(self) -> int:
        """Rank of the first process on this machine."""
        return self.machine_rank * self.local_world_size

    @property
    def has_main_process(self) -> bool:
        """Whether this command is, or starts, process 0."""
        return self.first_rank == 0 and not self.local_rank


def find_job(
    num_gpus: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str = "auto",
    environ: Mapping[str, str] = os.environ,
) -> Job:
    """The job that a command belongs to.

    Under torchrun, and in a step of several tasks under SLURM (`srun`), the environment says it.
    One SLURM task per machine with `num_gpus` above 1 starts that many processes on each.

    Args:
        num_gpus, num_machines, machine_rank, dist_url: detectron2's arguments. `dist_url` is
            tcp://host:port of machine 0, or "auto" on a single machine.

    Raises:
        UserError: there is no process to start, arguments and environment contradict each other,
            or machines have unequal numbers of processes.
    """
    if num_gpus < 1 or num_machines < 1:
        raise UserError(
            f"--num-gpus is {num_gpus} and --num-machines {num_machines}; each must be at least 1 "
            "(without GPUs, --num-gpus counts processes)"
        )
    if not 0 <= machine_rank < num_machines:
        raise UserError(
            f"--machine-rank is {machine_rank}; with --num-machines {num_machines} it is one of 0 "
            f"to {num_machines - 1}"
        )
    for name, keys, read in (("torchrun", _TORCHRUN, _torchrun), ("SLURM", _SLURM, _slurm)):
        if all(key in environ for key in keys):
            job = read(environ, num_gpus)
            if job.world_size > 1 or name == "torchrun":
                _check_arguments(name, job, num_gpus, num_machines)
                return job
    if dist_url == "auto":
        if num_machines > 1:
            raise UserError(
                "--dist-url auto works on one machine; give tcp://host:port of machine 0"
            )
        dist_url = f"tcp://127.0.0.1:{_free_port()}"
    host = re.fullmatch(r"tcp://\[?([^/\]]+?)\]?:\d+", dist_url)
    if not host:
        raise UserError(f"--dist-url is {dist_url!r}; it must be tcp://host:port of machine 0")
    return Job(num_gpus, num_machines, machine_rank, None, dist_url, host[1])


def _torchrun(environ: Mapping[str, str], num_gpus: int) -> Job:
    rank, world_size, local_rank, local_world_size = (int(environ[k]) for k in _TORCHRUN[:4])
    if world_size % local_world_size or rank % local_world_size != local_rank:
        raise UserError(
            f"torchrun started {local_world_size} of {world_size} processes on this machine; give "
            "every machine the same --nproc-per-node"
        )
    machines = world_size // local_world_size
    machine_rank = rank // local_world_size
    return Job(
        local_world_size, machines, machine_rank, local_rank, "env://", environ["MASTER_ADDR"]
    )


def _slurm(environ: Mapping[str, str], num_gpus: int) -> Job:
    rank, local_rank, num_tasks = (int(environ[key]) for key in _SLURM[:3])
    counts = environ["SLURM_STEP_TASKS_PER_NODE"]  # such as 4(x2),3
    per_machine = {int(n) for n in re.findall(r"(?:^|,)(\d+)", counts)}
    if len(per_machine) != 1:
        raise UserError(
            f"SLURM started {counts} tasks on the machines of this step; give every machine the "
            "same number with --ntasks-per-node"
        )
    tasks = per_machine.pop()
    if rank % tasks != local_rank:
        raise UserError(
            "SLURM numbers the tasks of this step across machines; use srun --distribution=block"
        )
    machines = num_tasks // tasks
    host = environ.get("MASTER_ADDR") or (
        "127.0.0.1" if machines == 1 else _first_host(environ["SLURM_STEP_NODELIST"])
    )
    # Steps that share a machine must not meet at the same port.
    number = int(environ.get("SLURM_JOB_ID", 0)) * 7 + int(environ.get("SLURM_STEP_ID", 0))
    url = f"tcp://{host}:{environ.get('MASTER_PORT') or 20000 + number % 20000}"
    if tasks == 1 and num_gpus > 1:
        return Job(num_gpus, machines, rank, None, url, host)
    return Job(tasks, machines, rank // tasks, local_rank, url, host)


def _first_host(nodes: str) -> str:
    """The first of SLURM's list of machines: node[03-05,9],other -> node03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _check_arguments(launcher: str, job: Job, num_gpus: int, num_machines: int) -> None:
    for option, given, actual in (
        ("--num-gpus", num_gpus, job.local_world_size),
        ("--num-machines", num_machines, job.num_machines),
    ):
        if given not in (1, actual):
            raise UserError(
                f"{option} is {given}, but {launcher} runs {actual} here; leave {option} out"
            )


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
