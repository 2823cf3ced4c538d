"""Precise BN sees the same images, augmented alike, on any number of processes."""

from itertools import islice

import numpy as np
import pytest
from detectron2.utils import comm

from moco_d2.engine.precise_bn import PreciseBatches


def draw(sample):
    """A mapper that augments as detectron2's do, from NumPy's global generator."""
    return {**sample, "crop": np.random.uniform(), "flip": np.random.randint(1000)}


def batches(monkeypatch, rank, world_size, count):
    monkeypatch.setattr(comm, "get_rank", lambda: rank)
    monkeypatch.setattr(comm, "get_world_size", lambda: world_size)
    samples = [{"image_id": i} for i in range(10)]
    return list(islice(PreciseBatches(samples, draw, batch_size=8, num_iter=3, seed=5), count))


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_share_the_batches_of_one(monkeypatch, world_size):
    expected = batches(monkeypatch, 0, 1, 3)
    ranks = [batches(monkeypatch, rank, world_size, 3) for rank in range(world_size)]
    assert [sum(parts, []) for parts in zip(*ranks, strict=True)] == expected
    assert len({sample["image_id"] for sample in sum(expected, [])[:10]}) == 10


def test_every_use_sees_the_same(monkeypatch):
    both = batches(monkeypatch, 0, 1, 6)
    assert both[:3] == both[3:]


def test_training_draws_on_as_if_nothing_had_happened(monkeypatch):
    np.random.seed(0)
    expected = np.random.uniform(size=3).tolist()
    np.random.seed(0)
    got = [np.random.uniform()]
    batches(monkeypatch, 0, 1, 2)
    assert [*got, *np.random.uniform(size=2)] == expected
