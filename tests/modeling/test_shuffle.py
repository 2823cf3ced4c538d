"""The shuffle: where images go, and that keys come back in place."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import run_processes

from moco_d2.modeling.shuffle import gather_keys, shuffle_images, shuffle_permutation


@settings(max_examples=30, deadline=None)
@given(batch=st.integers(1, 64), seed=st.integers(0, 2**31 - 1), iteration=st.integers(0, 2**40))
def test_gathered_keys_are_in_the_order_of_the_images(batch, seed, iteration):
    permutation = shuffle_permutation(batch, seed, iteration)
    assert sorted(permutation) == list(range(batch))
    images = torch.arange(batch)[:, None]
    shuffled = shuffle_images(images, permutation)
    assert shuffled[:, 0].tolist() == permutation.tolist()
    assert torch.equal(gather_keys(shuffled, permutation), images)


def test_permutation_depends_on_seed_and_iteration_alone():
    first = shuffle_permutation(256, 1, 2)
    np.testing.assert_array_equal(first, shuffle_permutation(256, 1, 2))
    assert not np.array_equal(first, shuffle_permutation(256, 1, 3))
    assert not np.array_equal(first, shuffle_permutation(256, 2, 2))


def test_permutations_are_uniform():
    """Each image reaches each slot equally often: chi-square below its 99.9 % point."""
    counts = np.zeros((4, 4))
    for iteration in range(2000):
        counts[np.arange(4), shuffle_permutation(4, 0, iteration)] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 27.9  # 9 degrees of freedom


def _exchange(world_size, n, folder):
    from detectron2.utils import comm

    rank = comm.get_rank()
    for iteration in range(4):
        permutation = shuffle_permutation(world_size * n, 5, iteration)
        images = torch.arange(rank * n, (rank + 1) * n, dtype=torch.uint8).view(n, 1, 1, 1)
        images = images.expand(n, 3, 4, 4).contiguous()
        shuffled = shuffle_images(images, permutation)
        mine = permutation[rank * n : (rank + 1) * n]
        assert shuffled.dtype == torch.uint8 and shuffled.shape == images.shape
        assert (shuffled.amin((1, 2, 3)).numpy() == mine).all()
        assert (shuffled.amax((1, 2, 3)).numpy() == mine).all()
        keys = gather_keys(shuffled[:, :1, 0, 0].float(), permutation)
        assert keys[:, 0].tolist() == list(range(world_size * n))
    open(f"{folder}/{rank}", "w").close()


def test_processes_exchange_images_and_every_one_gets_all_keys(tmp_path):
    run_processes(_exchange, 3, 3, 5, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2"]
