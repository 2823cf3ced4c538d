"""The queue against a Python list; the memory bank's draws, updates and refusals."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_pretrain_config

from moco_d2.modeling.dictionary import KeyQueue, MemoryBank, build_dictionary


def oldest_first(queue):
    return torch.roll(queue.keys, -int(queue.pointer), dims=0)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 20), batches=st.lists(st.integers(1, 27), min_size=1, max_size=12))
def test_queue_holds_the_last_k_keys_in_order(size, batches):
    """Any batch sizes, dividing K or not, smaller or larger than K."""
    queue, written = KeyQueue(size, 3), []
    rng = np.random.default_rng(size)
    for count in batches:
        keys = F.normalize(torch.from_numpy(rng.standard_normal((count, 3))).float(), dim=1)
        queue.enqueue_(keys)
        written.extend(keys)
    assert int(queue.filled) == min(size, len(written))
    assert int(queue.pointer) == len(written) % size
    if len(written) >= size:
        assert torch.equal(oldest_first(queue), torch.stack(written[-size:]))
    else:
        assert torch.equal(queue.keys[: len(written)], torch.stack(written))
        assert torch.equal(queue.keys[len(written) :], KeyQueue(size, 3).keys[len(written) :])


def test_n_steps_with_n_not_dividing_k():
    queue = KeyQueue(10, 4)
    keys = F.normalize(torch.randn(7 * 4, 4), dim=1)
    for step in range(7):
        queue.enqueue_(keys[4 * step : 4 * step + 4])
    assert torch.equal(oldest_first(queue), keys[-10:])


def test_unfilled_slots_are_unit_vectors_equal_for_equal_seeds():
    first, same, other = KeyQueue(50, 8, seed=3), KeyQueue(50, 8, seed=3), KeyQueue(50, 8, seed=4)
    np.testing.assert_allclose(first.keys.norm(dim=1).numpy(), 1, rtol=1e-6)
    assert torch.equal(first.keys, same.keys) and not torch.equal(first.keys, other.keys)


def test_writing_changes_the_buffer_in_place_and_survives_a_round_trip():
    queue = KeyQueue(6, 2)
    memory = queue.keys.data_ptr()
    queue.enqueue_(F.normalize(torch.randn(4, 2), dim=1))
    assert queue.keys.data_ptr() == memory
    restored = KeyQueue(6, 2, seed=9)
    restored.load_state_dict(queue.state_dict())
    more = F.normalize(torch.randn(5, 2), dim=1)
    queue.enqueue_(more)
    restored.enqueue_(more)
    for name, value in queue.state_dict().items():
        assert torch.equal(value, restored.state_dict()[name]), name
    assert queue.pointer.dtype == queue.filled.dtype == torch.int64 and queue.pointer.ndim == 0


def test_keys_of_another_length_are_refused():
    with pytest.raises(ValueError, match="keys of length 3 do not fit a queue of 2"):
        KeyQueue(6, 2).enqueue_(torch.ones(1, 3))


def test_an_empty_queue_is_refused():
    with pytest.raises(ValueError, match="its size is 0"):
        KeyQueue(0, 2)


def test_draws_are_uniform_and_depend_on_seed_and_iteration_only():
    bank, same = (MemoryBank(10, 4, 5000, 0.5, seed=3) for _ in range(2))
    draws = [bank.drawn(iteration) for iteration in (0, 1)]
    assert torch.equal(draws[0], same.drawn(0)) and not torch.equal(*draws)
    assert not torch.equal(draws[0], MemoryBank(10, 4, 5000, 0.5, seed=4).drawn(0))
    counts = np.bincount(torch.cat(draws), minlength=10)
    # 1000 each are expected, with a standard deviation of 30.
    assert counts.sum() == 10000 and np.abs(counts - 1000).max() < 150


@settings(max_examples=30, deadline=None)
@given(
    index=st.lists(st.integers(0, 6), min_size=1, max_size=12), momentum=st.sampled_from([0.0, 0.5])
)
def test_rows_move_towards_the_last_query_of_their_image(index, momentum):
    bank, rng = MemoryBank(7, 3, 2, momentum, seed=0), np.random.default_rng(len(index))
    before = bank.keys.numpy().astype(np.float64)
    q = rng.standard_normal((len(index), 3))
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    bank.update_(torch.tensor(index), torch.from_numpy(q).float())
    expected = before.copy()
    for i, query in zip(index, q, strict=True):
        expected[i] = momentum * before[i] + (1 - momentum) * query
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(bank.keys.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert list(bank.state_dict()) == ["keys"] and bank.keys.dtype == torch.float32


def test_what_no_dictionary_is_built_from():
    cfg = tiny_pretrain_config(MODEL__MOCO__DICTIONARY="memory_bank")
    with pytest.raises(ValueError, match="0 images .MODEL.MOCO.BANK_SIZE.*sets the number"):
        build_dictionary(cfg)
    with pytest.raises(ValueError, match="DICTIONARY is 'shelf'; known: queue, memory_bank"):
        build_dictionary(tiny_pretrain_config(MODEL__MOCO__DICTIONARY="shelf"))
