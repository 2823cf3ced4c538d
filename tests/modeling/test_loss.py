"""InfoNCE against float64 NumPy from Eq. 1 of the paper."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moco_d2.modeling.loss import info_nce


def unit_rows(rng, *shape):
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def reference(q, k, negatives, tau, ids=None, negative_ids=None):
    """Mean loss and gradients with respect to q, k and negatives, as Eq. 1 and its derivatives
    read, query by query."""
    n = len(q)
    loss, grads = 0.0, [np.zeros_like(x) for x in (q, k, negatives)]
    for i in range(n):
        used = np.arange(len(negatives)) if ids is None else np.flatnonzero(negative_ids != ids[i])
        keys = np.vstack([k[i : i + 1], negatives[used]])
        logits = keys @ q[i] / tau
        p = np.exp(logits - logits.max())
        p /= p.sum()
        loss += -np.log(p[0]) / n
        slope = (p - np.eye(len(p))[0]) / tau / n  # dL / dlogits, times 1 / tau
        grads[0][i] = slope @ keys
        grads[1][i] = slope[0] * q[i]
        grads[2][used] += slope[1:, None] * q[i]
    return loss, *grads


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 9),
    c=st.integers(1, 12),
    size=st.integers(1, 40),
    tau=st.sampled_from([0.05, 0.07, 0.2, 1.0]),
    seed=st.integers(0, 10**6),
    exclude=st.booleans(),
)
def test_loss_and_gradients_equal_the_papers_formula(n, c, size, tau, seed, exclude):
    rng = np.random.default_rng(seed)
    arrays = [unit_rows(rng, rows, c) for rows in (n, n, size)]
    ids = [rng.integers(0, 5, rows) for rows in (n, size)] if exclude else []
    expected_loss, *expected = reference(*arrays, tau, *ids)
    tensors = [torch.from_numpy(array).requires_grad_() for array in arrays]
    out = info_nce(*tensors, tau, *map(torch.from_numpy, ids))
    (3 * out.loss).backward()
    np.testing.assert_allclose(out.loss.item(), expected_loss, rtol=1e-6, atol=1e-12)
    for tensor, grad in zip(tensors, expected, strict=True):
        np.testing.assert_allclose(tensor.grad.numpy(), 3 * grad, rtol=1e-6, atol=1e-12)


def test_only_what_takes_a_gradient_gets_one():
    q, k, negatives = torch.eye(3).requires_grad_(), torch.eye(3), torch.eye(3)
    info_nce(q, k, negatives, 0.2).loss.backward()
    assert q.grad is not None and k.grad is None and negatives.grad is None


def test_a_query_whose_negatives_are_all_left_out_has_nothing_to_learn():
    """A batch of one with its own key as the only one."""
    q = torch.tensor([[0.6, 0.8]], requires_grad=True)
    ids = torch.zeros(1, dtype=torch.int64)
    loss, rank = info_nce(q, torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), 0.2, ids, ids)
    loss.backward()
    assert loss.item() == 0 and rank.item() == 0 and q.grad.abs().max() < 1e-6


def test_the_dictionary_may_be_overwritten_before_backward():
    rng = np.random.default_rng(0)
    q, k, negatives = unit_rows(rng, 4, 8), unit_rows(rng, 4, 8), unit_rows(rng, 20, 8)
    _, expected_grad, _, _ = reference(q, k, negatives, 0.2)
    q_t, queue = torch.from_numpy(q).requires_grad_(), torch.from_numpy(negatives.copy())
    loss = info_nce(q_t, torch.from_numpy(k), queue, 0.2).loss
    queue.fill_(0.5)
    loss.backward()
    np.testing.assert_allclose(q_t.grad.numpy(), expected_grad, rtol=1e-6)


def test_rank_counts_negatives_at_least_as_similar_as_the_positive():
    q = F.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), dim=1)
    k = F.normalize(torch.tensor([[1.0, 0.1], [1.0, 0.0], [1.0, 1.0]]), dim=1)
    negatives = F.normalize(torch.tensor([[0.0, 1.0], [1.0, 0.5], [-1.0, 0.0]]), dim=1)
    # The second query scores 0 with its positive: a tie with the last negative counts against it.
    assert info_nce(q, k, negatives, 0.1).rank.tolist() == [0, 3, 0]


def test_collapsed_features_do_not_count_as_solved():
    same = torch.full((4, 4), 0.5)
    assert info_nce(same, same, torch.full((9, 4), 0.5), 0.1).rank.tolist() == [9] * 4


def test_half_precision_input_is_computed_in_float32():
    rng = np.random.default_rng(1)
    q, k, negatives = (torch.from_numpy(unit_rows(rng, n, 16)).float() for n in (6, 6, 300))
    with torch.autocast("cpu", torch.bfloat16):
        inside = info_nce(q, k, negatives, 0.07).loss
    assert inside.dtype == torch.float32
    assert inside.item() == info_nce(q, k, negatives, 0.07).loss.item()


def test_shapes_that_disagree_are_refused_with_their_values():
    with pytest.raises(ValueError, match=r"\(2, 3\), \(2, 3\) and \(5, 4\)"):
        info_nce(torch.ones(2, 3), torch.ones(2, 3), torch.ones(5, 4), 0.2)
