"""Feature standard deviation and RankMe against their formulas, and at their extremes."""

import numpy as np
import pytest
import torch

from moco_d2.evaluation.spread import effective_rank, feature_std


def unit_rows(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def rankme(z):
    """exp of the entropy of singular values as shares of their sum (arXiv 2210.02885, Eq. 1)."""
    sigma = np.sqrt(np.clip(np.linalg.eigvalsh(z.T @ z), 0, None))
    p = sigma / sigma.sum() + 1e-7
    return np.exp(-(p * np.log(p)).sum())


@pytest.mark.parametrize("shape", [(40, 12), (12, 40)])
def test_both_equal_their_formulas(shape):
    rng = np.random.default_rng(0)
    z = unit_rows(rng.standard_normal(shape) * np.linspace(0.1, 3, shape[1]) + 0.5)
    expected_std = np.sqrt(((z - z.mean(0)) ** 2).mean(0)).mean() * np.sqrt(shape[1])
    assert feature_std(torch.from_numpy(z)).item() == pytest.approx(expected_std, rel=1e-12)
    # NumPy's has C singular values, of which C - N are 0 where N < C, and 1e-7 counts for each.
    assert effective_rank(torch.from_numpy(z)).item() == pytest.approx(rankme(z), rel=1e-4)
    assert effective_rank(torch.from_numpy(z).float()).item() == pytest.approx(rankme(z), rel=1e-4)


def test_isotropic_and_collapsed_features():
    rng = np.random.default_rng(1)
    isotropic = torch.from_numpy(unit_rows(rng.standard_normal((4000, 16))))
    assert feature_std(isotropic).item() == pytest.approx(1, abs=0.01)
    assert effective_rank(isotropic).item() == pytest.approx(16, rel=0.01)
    assert effective_rank(torch.eye(8)).item() == pytest.approx(8, rel=1e-4)
    collapsed = isotropic[:1].expand(50, -1)
    assert feature_std(collapsed).item() == pytest.approx(0, abs=1e-9)
    assert effective_rank(collapsed).item() == pytest.approx(1, abs=1e-3)
    assert effective_rank(torch.zeros(50, 16)).item() == pytest.approx(1, abs=1e-3)
    # Two dimensions are left of 16: a standard deviation alone would not tell.
    plane = torch.zeros(400, 16, dtype=torch.float64)
    plane[:, :2] = torch.from_numpy(unit_rows(rng.standard_normal((400, 2))))
    assert effective_rank(plane).item() == pytest.approx(2, rel=0.01)
