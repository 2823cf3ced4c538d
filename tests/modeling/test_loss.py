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


def reference(q, k, negatives, tau):
    """Mean loss and gradient with respect to q, as Eq. 1 and its derivative read."""
    loss, grad = 0.0, np.zeros_like(q)
    for i in range(len(q)):
        keys = np.vstack([k[i : i + 1], negatives])
        logits = keys @ q[i] / tau
        p = np.exp(logits - logits.max())
        p /= p.sum()
        loss += -np.log(p[0]) / len(q)
        one_hot = np.eye(len(p))[0]
        grad[i] = ((p - one_hot) @ keys) / tau / len(q)
    return loss, grad


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 9),
    c=st.integers(1, 12),
    size=st.integers(1, 40),
    tau=st.sampled_from([0.05, 0.07, 0.2, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_loss_and_gradient_equal_the_papers_formula(n, c, size, tau, seed):
    rng = np.random.default_rng(seed)
    q, k, negatives = unit_rows(rng, n, c), unit_rows(rng, n, c), unit_rows(rng, size, c)
    expected_loss, expected_grad = reference(q, k, negatives, tau)
    q_t = torch.from_numpy(q).requires_grad_()
    out = info_nce(q_t, torch.from_numpy(k), torch.from_numpy(negatives), tau)
    (3 * out.loss).backward()
    np.testing.assert_allclose(out.loss.item(), expected_loss, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(q_t.grad.numpy(), 3 * expected_grad, rtol=1e-6, atol=1e-12)


def test_the_dictionary_may_be_overwritten_before_backward():
    rng = np.random.default_rng(0)
    q, k, negatives = unit_rows(rng, 4, 8), unit_rows(rng, 4, 8), unit_rows(rng, 20, 8)
    _, expected_grad = reference(q, k, negatives, 0.2)
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


@pytest.mark.parametrize("which", ["k", "negatives"])
def test_keys_with_gradient_are_refused(which):
    tensors = {"q": torch.eye(3), "k": torch.eye(3), "negatives": torch.eye(3)}
    tensors[which] = tensors[which].clone().requires_grad_()
    with pytest.raises(ValueError, match="no gradient to keys"):
        info_nce(**tensors, temperature=0.2)


def test_shapes_that_disagree_are_refused_with_their_values():
    with pytest.raises(ValueError, match=r"\(2, 3\), \(2, 3\) and \(5, 4\)"):
        info_nce(torch.ones(2, 3), torch.ones(2, 3), torch.ones(5, 4), 0.2)
