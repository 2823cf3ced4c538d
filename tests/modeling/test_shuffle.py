"""The shuffle: where images go, and that keys come back in place."""

import numpy as np
import torch
import torch.distributed as dist
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


def _count_bytes(world_size, n, shape, folder):
    from detectron2.utils import comm

    real, sent = dist.all_to_all_single, []

    def counted(output, input, output_split_sizes, input_split_sizes):
        to_others = sum(input_split_sizes) - input_split_sizes[comm.get_rank()]
        sent.append(to_others * input[0].numel() * input.element_size())
        return real(output, input, output_split_sizes, input_split_sizes)

    dist.all_to_all_single = counted
    images = torch.zeros((n, *shape), dtype=torch.uint8)
    for iteration in range(20):
        shuffle_images(images, shuffle_permutation(world_size * n, 0, iteration))
    np.save(f"{folder}/{comm.get_rank()}.npy", sent)


def test_bytes_of_a_shuffle(tmp_path):
    """Every image travels at most once, as one byte per value: on average (W - 1) / W of a
    process's own, never more than all, where gathering floats sends 4 (W - 1) times all."""
    world_size, n, shape = 3, 8, (3, 6, 6)
    run_processes(_count_bytes, world_size, world_size, n, shape, str(tmp_path))
    sent = np.stack([np.load(tmp_path / f"{rank}.npy") for rank in range(world_size)])
    own, batch = n * np.prod(shape), world_size * n * np.prod(shape)
    assert sent.shape == (world_size, 20) and (sent > 0).all()
    assert (sent <= own).all()
    assert (sent <= (world_size - 1) / world_size * batch).all()
    assert abs(sent.mean() / ((world_size - 1) / world_size * own) - 1) < 0.1
    gathered_floats = 4 * (world_size - 1) * own
    assert (sent < gathered_floats / 8 + 1).all()
