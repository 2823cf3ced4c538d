"""Whatever ends one process of a job ends all, soon, and says what it was."""

import json
import os
import signal
import time

import jobs
import pytest
import torch
import torch.distributed as dist
from detectron2.engine import TrainerBase
from support import run_processes
from torch.multiprocessing import ProcessExitedException

from moco_d2.engine.guard import FOLLOWER_EXIT
from moco_d2.engine.hooks import Evaluation


@pytest.mark.parametrize(
    ("trainer", "survivor", "code", "reason"),
    [
        (jobs.Raising, 0, 1, "ArithmeticError: the cat is on the keyboard"),
        (jobs.KilledInStep, 0, -signal.SIGKILL, "ended without a word"),
        (jobs.FirstKilledInStep, 1, -signal.SIGKILL, "ended without a word"),
    ],
)
def test_a_process_that_fails_takes_the_other_down_and_is_named(
    images, tmp_path, trainer, survivor, code, reason
):
    cfg = jobs.job_config(images, tmp_path, SOLVER__MAX_ITER=100000)
    codes = jobs.run_job(cfg, trainer=trainer, processes=2)  # within a minute, or this fails
    assert codes[survivor] == FOLLOWER_EXIT and codes[1 - survivor] == code
    said = jobs.output(cfg, survivor)
    assert f"process {1 - survivor} of 2" in said and reason in said
    if survivor == 0:
        assert reason in (tmp_path / "log.txt").read_text()


def test_a_loader_worker_holds_no_connection_of_its_process(images, tmp_path):
    """Else the death of a process would not be noticed while its loader workers live."""
    cfg = jobs.job_config(images, tmp_path, DATALOADER__NUM_WORKERS=1, SOLVER__MAX_ITER=100000)
    codes = jobs.run_job(cfg, trainer=jobs.KilledInStep, processes=2)
    assert codes == [FOLLOWER_EXIT, -signal.SIGKILL]


def _last_one_dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_the_command_that_started_the_processes_names_the_one_that_was_killed():
    started = time.monotonic()
    with pytest.raises(ProcessExitedException, match=r"process 1 .* was killed by SIGKILL"):
        run_processes(_last_one_dies, 2)
    assert time.monotonic() - started < 60


def test_a_loss_that_is_not_finite_stops_all_processes_before_the_step(images, tmp_path):
    cfg = jobs.job_config(images, tmp_path, SOLVER__CHECKPOINT_PERIOD=2, SOLVER__MAX_ITER=100000)
    assert jobs.run_job(cfg, trainer=jobs.NotFiniteLoss, processes=2) == [2, 2]
    log = (tmp_path / "log.txt").read_text()
    assert "the loss became nan at iteration 4 on process 1 of 2" in log
    assert "Traceback" not in log
    assert f"the last good checkpoint is {tmp_path}/model_0000003.pth" in log
    record = json.loads((tmp_path / "not_finite_0000004.json").read_text())
    assert record["iteration"] == 4
    assert [p["losses"] for p in record["processes"]][1] == ["nan"]
    batch = [name for p in record["processes"] for name in p["images"]]
    assert len(batch) == 16 and all(os.path.isfile(name) for name in batch)
    # The step was not taken, so nothing of it can have been saved.
    assert jobs.last_checkpoint(cfg) == "model_0000003.pth"


def test_the_last_good_checkpoint_has_finite_weights(images, tmp_path):
    """A step may have spoilt the weights whose loss was still finite."""
    cfg = jobs.job_config(images, tmp_path, SOLVER__CHECKPOINT_PERIOD=2)
    assert jobs.run_job(cfg) == [0]
    for name in ("model_final.pth", "model_0000007.pth"):
        spoilt = jobs.saved(cfg, name)
        spoilt["model"]["encoder_q.head.0.weight"][0, 0] = float("inf")
        torch.save(spoilt, tmp_path / name)
    checkpointer = jobs.PretrainTrainer(cfg).checkpointer
    assert checkpointer.last_finite() == f"{tmp_path}/model_0000005.pth"


def test_a_killed_loader_worker_gives_a_sentence(images, tmp_path):
    cfg = jobs.job_config(images, tmp_path, DATALOADER__NUM_WORKERS=2, SOLVER__MAX_ITER=100000)
    assert jobs.run_job(cfg, trainer=jobs.LoaderKilled) == [2]
    log = (tmp_path / "log.txt").read_text()
    assert "shared memory" in log and "DATALOADER.NUM_WORKERS (now 2" in log


class ThreeSteps(TrainerBase):
    """Steps 0, 1 and 2, of which one may fail."""

    stop_signal = 0

    def __init__(self, fails: int | None, evaluate):
        super().__init__()
        self.fails = fails
        self.register_hooks([Evaluation(0, evaluate)])

    def run_step(self):
        if self.iter == self.fails:
            raise RuntimeError("the step failed")


def test_the_error_of_the_last_step_is_not_hidden_by_an_evaluation():
    evaluated = []
    ThreeSteps(None, lambda: evaluated.append(1)).train(0, 3)
    assert evaluated == [1]
    for fails in (1, 2):
        with pytest.raises(RuntimeError, match="the step failed"):
            ThreeSteps(fails, lambda: evaluated.append(1)).train(0, 3)
    assert evaluated == [1]
