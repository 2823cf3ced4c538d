"""The queue against a Python list."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moco_d2.modeling.dictionary import KeyQueue


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
