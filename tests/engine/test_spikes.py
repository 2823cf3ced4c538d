"""What counts as a spike, against NumPy, and what a run logs of it."""

import json

import numpy as np
import pytest
from detectron2.utils.events import EventStorage
from support import tiny_pretrain_config

from moco_d2.engine.spikes import WATCHED, SpikeCounter
from moco_d2.engine.trainer import PretrainTrainer

LOSS, GRADIENT = WATCHED


def reference(values):
    """Counts after each value: above median + max(10 MAD, 1 %) of the 100 finite ones before."""
    counts, seen = [], []
    for value in values:
        spike = False
        if np.isfinite(value):
            if len(seen) >= 100:
                before = np.array(seen[-100:])
                level = np.median(before)
                margin = max(10 * np.median(np.abs(before - level)), 0.01 * abs(level))
                spike = value > level + margin
            seen.append(value)
        counts.append((counts[-1] if counts else 0) + bool(spike))
    return counts


def noisy_run():
    """A loss that falls, with noise; spikes alone, two in a row, before the end of the first
    window, one that is not finite; and a new level that stays."""
    rng = np.random.default_rng(0)
    values = np.linspace(7, 4, 400) + 0.05 * rng.standard_normal(400)
    values[[50, 150, 200, 201]] += 3
    values[180] = np.inf
    values[300:] += 4
    return values.tolist()


def counts_of(counter, values, start=0):
    with EventStorage(start) as storage:
        for i, value in enumerate(values):  # as they come, several at a time
            written = {LOSS: [(start + i, value)], GRADIENT: [(start + i, 1.0)]}
            counter.update(written, storage)
        history = storage.history(WATCHED[LOSS]).values()
        assert [i for _, i in history] == list(range(start, start + len(values)))
        assert storage.history(WATCHED[GRADIENT]).latest() == 0
        return [count for count, _ in history]


def test_counts_equal_the_reference():
    values = noisy_run()
    expected = reference(values)
    assert expected[149] == 0 and expected[150] == 1 and expected[201] == 3
    # A new level is one of spikes until it makes up about half of the window.
    assert 30 <= expected[-1] - expected[299] <= 60
    assert counts_of(SpikeCounter(), values) == expected


def test_values_that_come_together_count_as_one_by_one():
    values = noisy_run()
    counter = SpikeCounter()
    with EventStorage() as storage:
        for first in range(0, 400, 20):
            counter.update({LOSS: list(enumerate(values))[first : first + 20]}, storage)
    assert counter.counts[LOSS] == reference(values)[-1]


def test_it_goes_on_from_its_state():
    values = noisy_run()
    first, second = SpikeCounter(), SpikeCounter()
    counts_of(first, values[:160])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert counts_of(second, values[160:], 160) == reference(values)[160:]


class SpikingTrainer(PretrainTrainer):
    """The loss of iteration 6 is ten times as large."""

    @classmethod
    def build_model(cls, cfg):
        model = super().build_model(cfg)
        model.register_forward_hook(_enlarge)
        return model


def _enlarge(model, inputs, losses):
    if model.training and model._steps_seen == 7:
        return {name: 10 * loss for name, loss in losses.items()}
    return None


@pytest.mark.parametrize("clip", [False, True])
def test_a_run_logs_its_spikes_and_the_gradient_before_clipping(
    images, tmp_path, monkeypatch, clip
):
    monkeypatch.setattr(SpikeCounter, "window", 5)
    cfg = tiny_pretrain_config(
        tmp_path,
        DATASETS__TRAIN=(str(images),),
        SOLVER__MAX_ITER=9,
        SOLVER__BASE_LR=1e-6,
        SOLVER__CLIP_GRADIENTS__ENABLED=clip,
        SOLVER__CLIP_GRADIENTS__CLIP_TYPE="norm",
        SOLVER__CLIP_GRADIENTS__CLIP_VALUE=1e-3,
        SOLVER__CLIP_GRADIENTS__NORM_TYPE=2.0,
    )
    trainer = SpikingTrainer(cfg)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    for name in WATCHED.values():
        assert [line[name] for line in lines[:7]] == [0] * 6 + [1], name
    norms = [line[GRADIENT] for line in lines]
    assert norms[6] > 3 * max(norms[:6]) and min(norms) > 1e-2
    if not clip:
        grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        expected = np.sqrt(sum((g.double() ** 2).sum().item() for g in grads))
        assert norms[-1] == pytest.approx(expected, rel=1e-5)
