"""Two dimensions of many: principal components, and t-SNE (van der Maaten and Hinton, 2008)."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_EXAGGERATION, _EXAGGERATED = 12.0, 250  # of the affinities, and for so many iterations
_BISECTIONS = 50


def principal_components(features: Tensor, count: int) -> Tensor:
    """Project features on the directions in which they vary most.

    Args:
        features: (N, C).
        count: directions; fewer where there are fewer.

    Returns:
        float64 (N, min(count, N, C)), by falling variance. Of the two signs of a direction that
        one in which its largest weight is positive.
    """
    centred = features.double() - features.double().mean(dim=0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    directions = directions[:count]
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    return centred @ (directions * largest.sign()).T


def affinities(points: Tensor, perplexity: float) -> Tensor:
    """How likely points choose each other as neighbours (Eq. 1 and Sec. 3.1 of the paper).

    Point i chooses j with the Gaussian probability p(j|i) whose width gives the perplexity
    (2 to the entropy in bits); p_ij is the mean of p(j|i) and p(i|j) over all N.

    Args:
        points: float (N, C).
        perplexity: below N - 1.

    Returns:
        (N, N), symmetric, of sum 1.
    """
    squared = torch.cdist(points, points).square_()
    squared.fill_diagonal_(torch.inf)
    squared -= squared.amin(dim=1, keepdim=True)  # cancels out, and keeps exp from underflow
    beta = squared.new_ones(len(points), 1)  # 1 / (2 sigma²)
    low, high = torch.zeros_like(beta), torch.full_like(beta, torch.inf)
    for _ in range(_BISECTIONS):
        p = torch.softmax(-beta * squared, dim=1)
        entropy = -torch.xlogy(p, p).sum(dim=1, keepdim=True)  # nats
        too_wide = entropy > math.log(perplexity)
        low, high = torch.where(too_wide, beta, low), torch.where(too_wide, high, beta)
        beta = torch.where(high.isinf(), 2 * beta, (low + high) / 2)
    p = torch.softmax(-beta * squared, dim=1)
    return (p + p.T) / (2 * len(points))


def gradient(p: Tensor, y: Tensor) -> Tensor:
    """Of KL(P || Q) by the map, Eq. 5 of the paper: 4 Σ_j (p_ij − q_ij)(y_i − y_j) / (1 + d_ij²).

    Args:
        p: (N, N), of :func:`affinities`, exaggerated or not.
        y: (N, 2).
    """
    squares = y.square().sum(dim=1)
    kernel = torch.addmm(squares[:, None] + squares, y, y.T, alpha=-2).add_(1).reciprocal_()
    kernel.fill_diagonal_(0)
    weights = torch.addcmul(p * kernel, kernel, kernel, value=-1 / kernel.sum().item())
    return 4 * (weights.sum(dim=1, keepdim=True) * y - weights @ y)


def tsne_bytes(count: int) -> int:
    """Memory that :func:`tsne` takes for so many float32 points: five (N, N), in `gradient`."""
    return 5 * 4 * count**2


def tsne(
    points: Tensor,
    *,
    perplexity: float = 30.0,
    iterations: Iterable[int] = range(750),
) -> Tensor:
    """Lay out points in a plane so that neighbours stay neighbours.

    The exact algorithm: time and memory (:func:`tsne_bytes`) grow with N². It starts from the
    two principal components, so that equal points give equal maps. Momentum, gains and exaggeration
    as in the authors' code, learning rate N / 48 (Belkina et al., 2019).

    Args:
        points: float (N, C), N at least 3.
        perplexity: neighbours that count, about; lowered to (N - 1) / 3.
        iterations: of gradient descent; the first 250 with exaggerated affinities.

    Returns:
        (N, 2), of mean 0.
    """
    p = affinities(points, min(perplexity, (len(points) - 1) / 3))
    y = principal_components(points, 2).to(points.dtype)
    y = 1e-4 * y / y[:, 0].std().clamp(min=1e-12)
    rate = max(len(points) / 48, 50.0)
    step, gains = torch.zeros_like(y), torch.ones_like(y)
    for i in iterations:
        early = i < _EXAGGERATED
        slope = gradient(p * _EXAGGERATION if early else p, y)
        onwards = slope * step < 0
        gains = torch.where(onwards, gains + 0.2, gains * 0.8).clamp_(min=0.01)
        step = (0.5 if early else 0.8) * step - rate * gains * slope
        y = y + step
        y = y - y.mean(dim=0)
    return y
