"""The loader of detectors: places of a stream, on any number of workers, from any iteration."""

import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moco_d2.data.detection import (
    RepeatedStream,
    ShareSampler,
    build_detection_loader,
    wide_images,
)
from moco_d2.data.streams import SampleStream


def batches(images, share, world_size=1, wide=None, start_iter=0, count=5, seed=3):
    """By iteration the shares of all processes."""
    stream = SampleStream(images, seed)
    ranks = [
        ShareSampler(
            stream,
            share=share,
            wide=wide,
            start_iter=start_iter,
            num_iters=count,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    return list(zip(*ranks, strict=True))


@given(st.integers(1, 20), st.integers(1, 6), st.sampled_from([1, 2, 3]))
@settings(max_examples=30, deadline=None)
def test_processes_share_the_batch_of_one(images, share, world_size):
    together = batches(images, share * world_size)
    apart = batches(images, share, world_size)
    assert [sum(shares, []) for shares in apart] == [batch for (batch,) in together]
    places = [place for (batch,) in together for place, _ in batch]
    assert places == list(range(len(places)))


@given(st.integers(2, 20), st.integers(1, 5), st.sampled_from([1, 2]), st.integers(0, 6), st.data())
@settings(max_examples=30, deadline=None)
def test_any_iteration_can_be_the_first_with_and_without_groups(n, share, world_size, start, data):
    wide = data.draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=n, max_size=n)))
    whole = batches(n, share, world_size, wide, count=start + 3)
    assert batches(n, share, world_size, wide, start_iter=start, count=3) == whole[start:]
    shares = [share for batch in whole for share in batch]
    if wide:
        assert all(len({wide[image] for _, image in share}) == 1 for share in shares)
    places = [place for share in shares for place, _ in share]
    assert len(set(places)) == len(places)


def test_rare_classes_come_up_as_often_as_their_factors_say():
    repeats = [1.0, 2.5, 3.0, 1.25]
    epochs = [RepeatedStream(repeats, seed=1).order(epoch).tolist() for epoch in range(400)]
    for image, factor in enumerate(repeats):
        times = [epoch.count(image) for epoch in epochs]
        assert set(times) == {int(np.floor(factor)), int(np.ceil(factor))}
        # The mean of 400 draws of 0 or 1 has a standard deviation of at most 0.025.
        assert np.mean(times) == pytest.approx(factor, abs=0.1)
    assert Counter(map(tuple, epochs)).most_common(1)[0][1] < 10  # in another order each
    assert RepeatedStream(repeats, seed=1).order(7).tolist() == epochs[7]


def draw(sample: dict) -> dict:
    return {**sample, "numpy": np.random.random(), "python": random.random()}


def test_augmentations_depend_on_the_place_alone():
    samples = [{"number": i} for i in range(7)]

    def load(start, workers, seed=5):
        sampler = ShareSampler(
            SampleStream(7, seed), share=2, start_iter=start, num_iters=8 - start
        )
        loader = build_detection_loader(samples, draw, sampler, seed=seed, num_workers=workers)
        return list(islice(loader, None))

    np.random.seed(0)
    random.seed(0)
    expected = (np.random.random(), random.random())
    np.random.seed(0)
    random.seed(0)
    whole = load(0, workers=0)
    assert (np.random.random(), random.random()) == expected  # nothing was taken from them
    assert load(3, workers=2) == whole[3:]
    assert load(0, workers=0, seed=6) != whole
    seen = [sample for batch in whole for sample in batch]
    for kind in ("numpy", "python"):
        assert len({sample[kind] for sample in seen}) == len(seen)


def test_images_without_a_stated_size_are_not_told_apart():
    assert wide_images([{"width": 2, "height": 1}, {"width": 1, "height": 1}]) == [True, False]
    assert wide_images([{"width": 2, "height": 1}, {}]) is None
