"""The command line as users start it: several processes, torchrun, SLURM, two machines."""

import atexit
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jobs
import pytest
import torch
from detectron2.utils import comm
from support import run_processes
from torch.multiprocessing import ProcessExitedException

from moco_d2.engine.distributed import launch
from moco_d2.engine.environment import find_job
from moco_d2.engine.setup import exit_code

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def expected(images, tmp_path_factory):
    """Losses by iteration of one process."""
    cfg = jobs.job_config(images, tmp_path_factory.mktemp("one"))
    assert jobs.run_job(cfg) == [0]
    return losses(cfg)


def losses(cfg) -> dict[int, float]:
    return {line["iteration"]: line["total_loss"] for line in jobs.metrics(cfg)}


def assert_agree(cfg, expected) -> None:
    ours = losses(cfg)
    common = ours.keys() & expected.keys()
    assert len(common) >= 3
    assert {i: ours[i] for i in common} == pytest.approx({i: expected[i] for i in common}, rel=1e-4)


def command(cfg, launcher=(sys.executable,), options=(), inside=()) -> subprocess.Popen:
    """Start tools/train_net.py in a session of its own, its output in a pipe."""
    path = f"{cfg.OUTPUT_DIR}/given.yaml"
    with open(path, "w") as f:
        f.write(cfg.dump())
    words = [*inside, *launcher, "tools/train_net.py", "--config-file", path, *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def end(process: subprocess.Popen) -> None:
    """Kill a command that still runs, which is when a test has failed, and what it has started."""
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        for pid in children.split():
            os.kill(int(pid), signal.SIGKILL)
        process.kill()


def read_until(process: subprocess.Popen, text: str) -> str:
    """What a process says up to a line with `text`, which must come."""
    said = ""
    for line in process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"{text!r} never came:\n{said}")


def test_sigterm_ends_two_processes_after_one_save_and_one_goes_on(images, tmp_path, expected):
    cfg = jobs.job_config(images, tmp_path, SOLVER__MAX_ITER=100000)
    process = command(cfg, options=["--num-gpus", "2"])
    try:
        read_until(process, "iter: 4 ")
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        end(process)
    assert process.returncode == 128 + signal.SIGTERM, said
    last = jobs.last_checkpoint(cfg)
    done = jobs.saved(cfg, last)["iteration"]
    assert done >= 4 and last == f"model_{done:07d}.pth"
    names = {path.name for path in tmp_path.iterdir()}
    assert {n for n in names if n.startswith("log")} == {"log.txt"}
    assert not [n for n in names if ".tmp" in n]

    cfg.SOLVER.MAX_ITER = max(done + 2, 8)
    assert jobs.run_job(cfg, resume=True) == [0]
    assert sorted(losses(cfg)) == list(range(cfg.SOLVER.MAX_ITER))
    assert_agree(cfg, expected)


def test_torchrun_starts_the_processes_of_a_machine(images, tmp_path, expected):
    cfg = jobs.job_config(images, tmp_path)
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node", "2"]
    process = command(cfg, launcher)
    try:
        said = process.communicate(timeout=120)[0]
    finally:
        end(process)
    assert process.returncode == 0, said
    assert losses(cfg).keys() == expected.keys()
    assert_agree(cfg, expected)
    assert [path.name for path in tmp_path.glob("log*")] == ["log.txt"]


def test_slurm_tasks_join_each_other(images, tmp_path, expected):
    """And draw one seed for all of them."""
    cfg = jobs.job_config(images, tmp_path, SEED=-1)
    environ = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
    }
    tasks = [
        jobs.start_command(cfg, {**environ, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)})
        for r in range(2)
    ]
    assert jobs.finish(tasks) == [0, 0]
    seed = jobs.saved(cfg)["recipe"]["seed"]
    alone = jobs.job_config(images, tmp_path / "alone", SEED=seed)
    assert jobs.run_job(alone) == [0]
    assert losses(cfg).keys() == expected.keys()
    assert_agree(cfg, losses(alone))
    assert [path.name for path in tmp_path.glob("log*")] == ["log.txt"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts():
    """Two network namespaces with a cable between them, 10.77.0.1 and .2; or why there are none.

    Yields their names, and an empty text; or no names, and the machine's words.
    """
    names = [f"moco{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "cable",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "cable",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, ""
    except subprocess.CalledProcessError as error:
        yield [], error.stderr
    except FileNotFoundError as error:
        yield [], str(error)
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_machines_train_as_one_process_and_end_when_the_link_is_cut(images, tmp_path, expected):
    with two_hosts() as (hosts, refusal):
        if not hosts:
            known = "permitted|denied|No such file|Unknown device|not supported"
            assert re.search(known, refusal), refusal
            warnings.warn(f"two machines were not tried, for want of one: {refusal}", stacklevel=1)
            return
        cfg = jobs.job_config(images, tmp_path, SOLVER__MAX_ITER=100000)
        machines = [
            command(
                cfg,
                [*TORCHRUN, "--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(rank)]
                + ["--master_addr", "10.77.0.1", "--master_port", "29477"],
                inside=["ip", "netns", "exec", host, "env", "GLOO_SOCKET_IFNAME=cable"],
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            read_until(machines[0], "iter: 4 ")
            ip("-n", hosts[0], "link", "set", "cable", "down")
            cut = time.monotonic()
            said = [machine.communicate(timeout=60)[0] for machine in machines]
            assert time.monotonic() - cut < 60
        finally:
            for machine in machines:
                end(machine)
    assert all(machine.returncode for machine in machines), said
    assert "process 1 of 2" in said[0] and "network between is gone" in said[0]
    assert "process 0 of 2" in said[1] and "network between is gone" in said[1]
    assert_agree(cfg, expected)


def test_a_process_of_a_job_ends_without_tearing_the_interpreter_down(tmp_path):
    """What threads of libraries still hold is dropped by the operating system; see `_leave`."""
    with pytest.raises(ProcessExitedException, match="exit code 7"):
        run_processes(_leave_traces, 2, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exit 0", "exit 1"]


def _leave_traces(folder: str) -> None:
    rank = comm.get_rank()
    atexit.register(Path(folder, f"exit {rank}").touch)
    # Modules of a dying interpreter lose their contents, this object among them.
    sys.modules["trace"] = _Trace(Path(folder, f"torn down {rank}"))
    raise SystemExit(7)


def test_more_processes_than_gpus_are_refused_before_any_starts(monkeypatch, tmp_path, capsys):
    """On the CPU they run, however many GPUs there are."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def code(device: str) -> int:
        return exit_code(lambda: launch(_leave_traces, find_job(2), device, (str(tmp_path),)))

    assert code("cuda") == 2
    assert capsys.readouterr().err == (
        "error: --num-gpus is 2 and this machine has 1 GPU: each process needs one of its own; "
        "give fewer, or run on the CPU, whose cores they share\n"
    )
    assert not list(tmp_path.iterdir())
    assert code("cpu") == 7
    assert len(list(tmp_path.iterdir())) == 2


class _Trace:
    def __init__(self, path: Path):
        self._touch = path.touch

    def __del__(self):
        self._touch()
