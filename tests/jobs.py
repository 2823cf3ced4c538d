"""Whole jobs in processes of their own, which may be made to fail, and what they leave behind."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import cv2
import numpy as np
import torch
from detectron2.engine import HookBase
from detectron2.utils import comm
from support import tiny_pretrain_config

from moco_d2.checkpoint import checkpointer as checkpointer_module
from moco_d2.engine import setup
from moco_d2.engine.distributed import launch
from moco_d2.engine.environment import Job, find_job
from moco_d2.engine.hooks import Checkpoints
from moco_d2.engine.signals import stop_requested
from moco_d2.engine.trainer import PretrainTrainer

# Processes start as forks of one that has imported everything, which saves seconds each.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["moco_d2.engine.setup"])

ARGUMENTS = Namespace(config_file="", eval_only=False, resume=False)
# What no two runs have in common.
TIMES = {"time", "data_time", "eta_seconds", "[metric]images_per_second"}


def job_config(images: Path, output: Path, **overrides):
    """A tiny pretraining job whose learning rate does not depend on how long it runs, and is low
    enough for rounding not to grow."""
    options = {
        "SOLVER__BASE_LR": 0.003,
        "DATASETS__TRAIN": (str(images),),
        "SOLVER__LR_SCHEDULER_NAME": "WarmupMultiStepLR",
        "SOLVER__STEPS": (),
        "SOLVER__MAX_ITER": 8,
        "SOLVER__CHECKPOINT_PERIOD": 3,
        **overrides,
    }
    return tiny_pretrain_config(output, **options)


def draw_images(folder: Path, count: int = 30) -> Path:
    """A folder of smooth random pictures in two classes."""
    rng = np.random.default_rng(0)
    for i in range(count):
        path = folder / f"class{i % 2}" / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        cv2.imwrite(str(path), cv2.resize(coarse, (64, 48)))
    return folder


def start(cfg, trainer=PretrainTrainer, resume: bool = False, processes: int = 1) -> list:
    """Start the processes of a job as a launcher does. Their output goes to OUTPUT_DIR/<rank>."""
    Path(cfg.OUTPUT_DIR).mkdir(parents=True, exist_ok=True)
    if processes == 1:
        jobs = [Job()]
    else:
        url = find_job(processes).url
        jobs = [Job(processes, 1, 0, rank, url) for rank in range(processes)]
    return [start_function(_member, job, cfg, trainer, resume) for job in jobs]


def run_on_processes(function, processes: int, *args, seconds: float = 300) -> None:
    """Run a top-level function of a test file in gloo processes; faster than `run_processes`."""
    url = find_job(processes).url
    jobs = [Job(processes, 1, 0, rank, url) for rank in range(processes)]
    codes = finish([start_function(_call, job, function, args) for job in jobs], seconds)
    assert codes == [0] * processes


def _call(job: Job, function, args) -> None:
    torch.set_num_threads(1)
    launch(function, job, "cpu", args)


def start_function(function, *args):
    process = _server.Process(target=function, args=args)
    process.start()
    return process


def finish(processes: list, seconds: float = 60) -> list[int]:
    """Exit codes of processes that end in time; a killed one's is minus the signal's number."""
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert None not in codes, "a process did not end in time"
    return codes


def run_job(cfg, **how) -> list[int]:
    return finish(start(cfg, **how))


def _member(job: Job, cfg, trainer, resume: bool) -> None:
    rank = job.local_rank or 0
    descriptor = os.open(f"{cfg.OUTPUT_DIR}/{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loader workers, as anywhere else
    setup.TRAINERS[cfg.MODEL.META_ARCHITECTURE] = trainer
    args = Namespace(**{**vars(ARGUMENTS), "resume": resume})
    launch(setup._main, job, "cpu", (cfg, [], args))


def start_command(cfg, environ: dict[str, str]):
    """Start tools/train_net.py as a launcher does that says all in the environment."""
    return start_function(_command, cfg, environ)


def _command(cfg, environ: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environ)
    path = f"{cfg.OUTPUT_DIR}/{os.getpid()}.yaml"
    Path(path).write_text(cfg.dump())
    sys.exit(setup.run(["--config-file", path], epilog=""))


def output(cfg, rank: int = 0) -> str:
    path = Path(cfg.OUTPUT_DIR, str(rank))
    return path.read_text() if path.exists() else ""


def metrics(cfg) -> list[dict]:
    """Lines of metrics.json, without times."""
    lines = Path(cfg.OUTPUT_DIR, "metrics.json").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def saved(cfg, name: str = "model_final.pth") -> dict:
    return torch.load(Path(cfg.OUTPUT_DIR, name), weights_only=True)


def last_checkpoint(cfg) -> str:
    return Path(cfg.OUTPUT_DIR, "last_checkpoint").read_text()


class Sabotaged(PretrainTrainer):
    """Fails in iteration 4 on the last process, in a way that subclasses say."""

    def fail(self):
        raise NotImplementedError

    def run_step(self):
        super().run_step()
        if self.iter == 4 and comm.get_rank() == comm.get_world_size() - 1:
            self.fail()


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


class KilledInStep(Sabotaged):
    """After the optimizer's step, before the queue and the key encoder have moved."""

    def fail(self):
        kill_this_process()


class FirstKilledInStep(PretrainTrainer):
    def run_step(self):
        super().run_step()
        if self.iter == 4 and comm.is_main_process():
            kill_this_process()


class Raising(Sabotaged):
    def fail(self):
        raise ArithmeticError("the cat is on the keyboard")


class Stopping(PretrainTrainer):
    """Is asked to stop again and again, each time in another way, as are its loader workers."""

    signals = {1: signal.SIGTERM, 3: signal.SIGINT, 5: signal.SIGUSR1}

    def run_step(self):
        super().run_step()
        if self.iter in self.signals:
            processes = [os.getpid(), *(w.pid for w in multiprocessing.active_children())]
            kill = ["kill", f"-{self.signals[self.iter]:d}", *map(str, processes)]
            subprocess.run(kill, check=True)
            while not stop_requested():  # the next step finds it
                pass


class Stuck(Sabotaged):
    def fail(self):
        print("stuck", flush=True)
        multiprocessing.Event().wait()


class NotFiniteLoss(PretrainTrainer):
    """The last process's loss is NaN in iteration 4."""

    @classmethod
    def build_model(cls, cfg):
        model = super().build_model(cfg)
        model.register_forward_hook(_spoil)
        return model


def _spoil(model, inputs, losses):
    last = comm.get_rank() == comm.get_world_size() - 1
    if model._steps_seen == 5 and last:
        return {name: loss * float("nan") for name, loss in losses.items()}
    return None


class KilledInSave(PretrainTrainer):
    """In the middle of writing the second checkpoint."""

    def train(self):
        whole, saves = torch.save, []

        def half(data, f):
            saves.append(data)
            if len(saves) == 2:
                f = _DeadlyFile(f)
            whole(data, f)

        checkpointer_module.torch.save = half
        return super().train()


class _DeadlyFile:
    def __init__(self, f):
        self._file, self._written = f, 0

    def write(self, data):
        self._written += len(data)
        if self._written > 1 << 20:
            self._file.flush()
            kill_this_process()
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)


class KilledAfterSave(PretrainTrainer):
    """Once the second checkpoint is there, before that iteration is evaluated or written."""

    def build_hooks(self):
        result = super().build_hooks()
        after = next(i for i, h in enumerate(result) if isinstance(h, Checkpoints)) + 1
        return [*result[:after], _KillAt(5), *result[after:]]


class LoaderKilled(Sabotaged):
    def fail(self):
        for worker in multiprocessing.active_children():
            worker.kill()


class _KillAt(HookBase):
    def __init__(self, iteration: int):
        self._iteration = iteration

    def after_step(self):
        if self.trainer.iter == self._iteration:
            kill_this_process()
