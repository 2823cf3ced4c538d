"""Images per second, and what the log says when the loader is too slow."""

import json
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from detectron2.utils.events import EventStorage
from support import tiny_pretrain_config

from moco_d2.engine.alarms import Alarms
from moco_d2.engine.throughput import Throughput
from moco_d2.engine.trainer import PretrainTrainer


def run(waits: list[float], caplog, num_workers: int = 0, period: int = 4) -> tuple[list, str]:
    """Steps of half a second, of which parts are waits; the rates logged, and the log."""
    hook = Throughput(32, period, num_workers, processes=1, alarms=Alarms())
    with EventStorage() as storage:
        hook.trainer = SimpleNamespace(storage=storage, start_iter=0, max_iter=len(waits))
        for iteration, wait in enumerate(waits):
            hook.trainer.iter = storage.iter = iteration
            storage.put_scalars(time=0.5, data_time=wait)
            hook.after_step()
        rates = storage.histories()["[metric]images_per_second"].values()
    return rates, caplog.text


def test_images_per_second(caplog):
    rates, log = run([0.0] * 12, caplog)
    assert rates == [(64.0, 3), (64.0, 7), (64.0, 11)] and log == ""


def test_a_slow_loader_is_named_once_with_the_setting(caplog):
    _, log = run([0.3] * 16, caplog)
    assert log.count("The loader is the bottleneck: 0.300 s of a step of 0.500 s") == 1
    assert "raise DATALOADER.NUM_WORKERS, now 0." in log


def test_with_workers_for_all_cores_the_cache_is_named(caplog):
    _, log = run([0.3] * 8, caplog, num_workers=4096)
    assert "keep decoded images with DATALOADER.CACHE" in log


@pytest.mark.parametrize("waits", [[0.05] * 12, [3.0] * 4 + [0.0] * 8, [0, 0, 0, 9.0] * 3])
def test_the_start_and_single_waits_are_no_bottleneck(caplog, waits):
    assert run(waits, caplog)[1] == ""


def test_a_run_logs_times_and_rate(tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(8):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / f"images/{i}.png"), pixels)
    names = (str(tmp_path / "images"),)
    trainer = PretrainTrainer(
        tiny_pretrain_config(tmp_path / "run", DATASETS__TRAIN=names, SOLVER__MAX_ITER=5)
    )
    trainer.train()
    lines = (tmp_path / "run/metrics.json").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["[metric]images_per_second"] == pytest.approx(16 / last["time"])
    assert 0 < last["data_time"] < last["time"]
