"""The sample stream and its random numbers are functions of seed and position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moco_d2.data.build import PositionBatchSampler
from moco_d2.data.streams import SampleStream, Stream, generator

SEEDS = st.integers(-(2**63), 2**64 - 1)
WORDS = st.integers(0, 2**64 - 1)


def local_batches(num_images, batch, ranks, seed=3, **options) -> list[list[list]]:
    return [
        list(
            PositionBatchSampler(
                num_images, batch_size=batch, seed=seed, rank=r, world_size=ranks, **options
            )
        )
        for r in range(ranks)
    ]


@settings(deadline=None)
@given(st.integers(1, 300), SEEDS, st.integers(0, 2**40))
def test_each_epoch_is_a_permutation(num_samples, seed, epoch):
    stream = SampleStream(num_samples, seed)
    samples = stream.samples(epoch * num_samples, num_samples)
    assert samples.dtype == np.int64
    np.testing.assert_array_equal(np.sort(samples), np.arange(num_samples))


@settings(deadline=None)
@given(st.integers(1, 50), SEEDS, st.integers(0, 500), st.integers(0, 200))
def test_a_piece_of_the_stream_is_cut_from_the_whole(num_samples, seed, first, count):
    epochs = range((first + count) // num_samples + 1)
    whole = np.concatenate([SampleStream(num_samples, seed).order(epoch) for epoch in epochs])
    piece = SampleStream(num_samples, seed).samples(first, count)
    np.testing.assert_array_equal(piece, whole[first : first + count])


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(SampleStream(50, seed).order(e)) for seed in (0, 1, -1) for e in range(3)]
    assert len(set(orders)) == 9


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**32), st.integers(1, 5))
def test_blocks_of_ranks_make_up_the_global_batch(num_images, quarter, start, iterations):
    batch = 4 * quarter
    options = {"start_iter": start, "num_iters": iterations}
    (whole,) = local_batches(num_images, batch, 1, **options)
    assert len(whole) == iterations
    for ranks in (2, 4):
        shares = local_batches(num_images, batch, ranks, **options)
        for iteration in range(iterations):
            joined = [place for share in shares for place in share[iteration]]
            assert joined == whole[iteration]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 20))
def test_starting_later_gives_the_rest_of_the_same_stream(num_images, batch, start):
    (whole,) = local_batches(num_images, batch, 1, num_iters=start + 3)
    (rest,) = local_batches(num_images, batch, 1, start_iter=start, num_iters=3)
    assert rest == whole[start:]
    positions = [position for places in whole for position, _ in places]
    assert positions == list(range(len(positions)))


def test_a_batch_that_processes_cannot_share_is_refused():
    with pytest.raises(ValueError, match="IMS_PER_BATCH is 10, which 4 process"):
        PositionBatchSampler(100, batch_size=10, seed=0, world_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(Stream), SEEDS, WORDS, WORDS), min_size=2, max_size=2))
def test_streams_repeat_and_never_coincide(keys):
    first, second = ([generator(*key).bytes(64) for _ in range(2)] for key in keys)
    assert first[0] == first[1] and second[0] == second[1]
    (stream, seed, *rest), (other_stream, other_seed, *other_rest) = keys
    same = (stream, seed % 2**64, rest) == (other_stream, other_seed % 2**64, other_rest)
    assert (first[0] == second[0]) == same


def test_neighbouring_positions_do_not_overlap():
    """Long draws of one stream never run into the next position's or view's numbers."""
    words = [
        set(generator(Stream.VIEW, 0, position, view).integers(2**63, size=5000).tolist())
        for position in range(3)
        for view in range(2)
    ]
    assert len(set().union(*words)) == sum(map(len, words))
