"""A run that was killed or stopped and goes on is the run that was not, bit for bit."""

import os
import signal

import jobs
import pytest
import torch


def config(images, folder, **overrides):
    """Checkpoints, evaluations and metrics fall on different iterations, and on the same."""
    return jobs.job_config(
        images,
        folder,
        DATASETS__TEST=(str(images),),
        TEST__EVAL_PERIOD=3,
        LOG_PERIOD=2,
        **overrides,
    )


@pytest.fixture(scope="module")
def uninterrupted(images, tmp_path_factory):
    cfg = config(images, tmp_path_factory.mktemp("uninterrupted"))
    assert jobs.run_job(cfg) == [0]
    return cfg


def assert_same(a, b, path="") -> None:
    """Same structure, same bits."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path


def assert_same_run(cfg, expected) -> None:
    assert jobs.metrics(cfg) == jobs.metrics(expected)
    ours, theirs = jobs.saved(cfg), jobs.saved(expected)
    for checkpoint in (ours, theirs):
        for name in jobs.TIMES:
            checkpoint["metrics"]["scalars"].pop(name, None)
        said = checkpoint["alarms"]["said"]  # that of the loader depends on times
        checkpoint["alarms"]["said"] = [kind for kind in said if kind != "loader"]
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("trainer", "expected_checkpoint", "damaged"),
    [
        (jobs.KilledInStep, "model_0000002.pth", False),
        (jobs.KilledInSave, "model_0000002.pth", False),
        (jobs.KilledAfterSave, "model_0000005.pth", False),
        (jobs.KilledAfterSave, "model_0000005.pth", True),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(
    images, tmp_path, uninterrupted, trainer, expected_checkpoint, damaged
):
    cfg = config(images, tmp_path)
    assert jobs.run_job(cfg, trainer=trainer) == [-signal.SIGKILL]
    assert jobs.last_checkpoint(cfg) == expected_checkpoint
    if damaged:
        content = bytearray((tmp_path / expected_checkpoint).read_bytes())
        content[len(content) // 2] ^= 1
        (tmp_path / expected_checkpoint).write_bytes(content)
    assert jobs.run_job(cfg, resume=True) == [0]
    assert (f"{expected_checkpoint} is damaged" in jobs.output(cfg)) == damaged
    assert_same_run(cfg, uninterrupted)
    assert [p.name for p in tmp_path.iterdir() if ".tmp" in p.name] == []


def test_killed_and_resumed_on_two_processes_agrees(images, tmp_path, uninterrupted):
    cfg = config(images, tmp_path)
    assert jobs.run_job(cfg, trainer=jobs.KilledInStep) == [-signal.SIGKILL]
    assert jobs.run_job(cfg, resume=True, processes=2) == [0, 0]
    for ours, theirs in zip(jobs.metrics(cfg), jobs.metrics(uninterrupted), strict=True):
        assert ours["iteration"] == theirs["iteration"]
        if "total_loss" in theirs:
            assert ours["total_loss"] == pytest.approx(theirs["total_loss"], rel=1e-4)
    weights = jobs.saved(cfg)["model"]
    for name, expected in jobs.saved(uninterrupted)["model"].items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-3, msg=name)


def test_a_signal_ends_the_run_after_a_save_and_it_goes_on_exactly(images, tmp_path, uninterrupted):
    cfg = config(images, tmp_path, DATALOADER__NUM_WORKERS=1)
    for stopped_in, number in ((2, signal.SIGTERM), (4, signal.SIGINT), (6, signal.SIGUSR1)):
        assert jobs.run_job(cfg, trainer=jobs.Stopping, resume=True) == [128 + number]
        assert jobs.last_checkpoint(cfg) == f"model_{stopped_in:07d}.pth"
    assert jobs.run_job(cfg, resume=True) == [0]
    assert_same_run(cfg, uninterrupted)


def test_a_second_signal_ends_a_run_that_is_stuck(images, tmp_path):
    cfg = config(images, tmp_path)
    (process,) = jobs.start(cfg, trainer=jobs.Stuck)
    tries = 0
    while process.exitcode is None and tries < 100:
        if "stuck" in jobs.output(cfg):
            os.kill(process.pid, signal.SIGTERM)
        process.join(0.3)
        tries += 1
    assert jobs.finish([process]) == [128 + signal.SIGTERM]
    assert "ends at once" in jobs.output(cfg)
    assert jobs.last_checkpoint(cfg) == "model_0000002.pth"
