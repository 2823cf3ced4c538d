"""Principal components and t-SNE against the papers' formulas in float64 NumPy."""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from moco_d2.visualization.tsne import affinities, gradient, principal_components, tsne, tsne_bytes


def points(count: int = 12, channels: int = 5) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(count, channels)) * [1, 5, 2, 0.5, 3][:channels]


def conditional(x: np.ndarray, i: int, beta: float) -> np.ndarray:
    squared = np.sum((x[i] - x) ** 2, axis=1)
    squared[i] = np.inf
    p = np.exp(-beta * (squared - squared.min()))
    return p / p.sum()


def entropy(p: np.ndarray) -> float:
    return -np.sum(p[p > 0] * np.log(p[p > 0]))


def reference_affinities(x: np.ndarray, perplexity: float) -> np.ndarray:
    rows = []
    for i in range(len(x)):

        def excess(beta, i=i):
            return entropy(conditional(x, i, beta)) - np.log(perplexity)

        rows.append(conditional(x, i, brentq(excess, 1e-6, 1e3, xtol=1e-14)))
    p = np.array(rows)
    return (p + p.T) / (2 * len(x))


def reference_gradient(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    kernel = 1 / (1 + np.sum((y[:, None] - y[None]) ** 2, axis=2))
    np.fill_diagonal(kernel, 0)
    q = kernel / kernel.sum()
    return 4 * np.einsum("ij,ijc->ic", (p - q) * kernel, y[:, None] - y[None])


def reference_components(x: np.ndarray, count: int) -> np.ndarray:
    centred = x - x.mean(axis=0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    directions = vectors[:, ::-1][:, :count]
    largest = np.abs(directions).argmax(axis=0)
    return centred @ (directions * np.sign(directions[largest, range(count)]))


def test_principal_components_are_the_directions_of_most_variance():
    x = points()
    found = principal_components(torch.from_numpy(x), 3).numpy()
    np.testing.assert_allclose(found, reference_components(x, 3), atol=1e-10)


def test_affinities_have_the_perplexity():
    x = points()
    found = affinities(torch.from_numpy(x), 4.0).numpy()
    np.testing.assert_allclose(found, reference_affinities(x, 4.0), atol=1e-10)
    assert found.sum() == pytest.approx(1)


def test_affinities_of_far_and_of_equal_points_are_finite():
    x = torch.tensor([[0.0], [0.0], [1e4], [1e4 + 1], [1e4 + 2]])
    p = affinities(x, 2.0)
    assert torch.isfinite(p).all() and p.sum().item() == pytest.approx(1)


def test_features_that_have_collapsed_are_one_point():
    assert (tsne(torch.full((5, 3), 0.1), iterations=range(3)) == 0).all()


def test_the_gradient_is_that_of_the_divergence():
    rng = np.random.default_rng(4)
    p, y = reference_affinities(points(), 4.0), rng.normal(size=(12, 2))
    found = gradient(torch.from_numpy(p), torch.from_numpy(y)).numpy()
    np.testing.assert_allclose(found, reference_gradient(p, y), atol=1e-12)

    def divergence(y):
        kernel = 1 / (1 + np.sum((y[:, None] - y[None]) ** 2, axis=2))
        np.fill_diagonal(kernel, 0)
        q = kernel / kernel.sum()
        off = ~np.eye(len(y), dtype=bool)
        return np.sum(p[off] * np.log(p[off] / q[off]))

    step = np.zeros_like(y)
    step[5, 1] = 1e-6
    slope = (divergence(y + step) - divergence(y - step)) / 2e-6
    assert found[5, 1] == pytest.approx(slope, rel=1e-6)


def test_steps_are_the_authors():
    """Exaggeration and momentum change after 250 iterations; gains follow the signs."""
    x, iterations = points(), [0, 1, 2, 249, 250, 251, 252]
    p = reference_affinities(x, 11 / 3)
    y = reference_components(x, 2)
    y = 1e-4 * y / y[:, 0].std(ddof=1)
    step, gains = np.zeros_like(y), np.ones_like(y)
    for i in iterations:
        slope = reference_gradient(p * (12 if i < 250 else 1), y)
        onwards = np.sign(slope) * np.sign(step) < 0
        gains = np.maximum(np.where(onwards, gains + 0.2, gains * 0.8), 0.01)
        step = (0.5 if i < 250 else 0.8) * step - 50 * gains * slope
        y = y + step
        y = y - y.mean(axis=0)
    found = tsne(torch.from_numpy(x), iterations=iterations).numpy()
    np.testing.assert_allclose(found, y, rtol=1e-6)


def test_clusters_stay_together():
    rng = np.random.default_rng(5)
    cluster = np.repeat(np.arange(4), 15)
    x = 6 * np.eye(8)[cluster] + rng.normal(size=(60, 8))
    y = tsne(torch.from_numpy(x).float(), perplexity=10).numpy()
    assert np.isfinite(y).all()
    apart = np.linalg.norm(y[:, None] - y[None], axis=2)
    same = cluster[:, None] == cluster
    assert apart[same].max() < apart[~same].min()


class _LargestTensors(TorchDispatchMode):
    """Counts the tensors of so many bytes that live at once; `most` after any operation."""

    def __init__(self, nbytes: int):
        super().__init__()
        self._nbytes, self._seen, self.most = nbytes, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() == self._nbytes:
            reference = StorageWeakRef(result.untyped_storage())
            self._seen[reference.cdata] = reference
        self._seen = {k: r for k, r in self._seen.items() if not r.expired()}
        self.most = max(self.most, len(self._seen))
        return result


def test_memory_is_that_of_the_matrices_that_live_at_once():
    x = torch.from_numpy(points(40)).float()
    with _LargestTensors(4 * 40**2) as matrices:
        tsne(x, iterations=[0, 250])
    assert matrices.most * 4 * 40**2 == tsne_bytes(40)
