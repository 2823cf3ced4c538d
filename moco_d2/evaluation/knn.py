"""Weighted k-nearest-neighbour classification of frozen features (Wu et al., arXiv 1805.01978)."""

import torch
from torch import Tensor

from moco_d2.errors import UserError

_SIMILARITIES = 1 << 27  # at a time, which bounds memory: half a gigabyte of float32


@torch.no_grad()
def nearest_neighbours(
    bank: Tensor, queries: Tensor, k: int, own_index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Find the k rows of a bank that are most similar to each query.

    Of equally similar ones, those that come first in the bank are nearer.

    Args:
        bank: float (M, C) L2-normalised features.
        queries: float (N, C) L2-normalised.
        k: number of neighbours; more than the bank holds takes them all.
        own_index: int64 (N,) row of the bank that is the query itself and no neighbour of it.

    Returns:
        float (N, k) cosine similarities, falling, and int64 (N, k) rows of the bank.

    Raises:
        UserError: there is no neighbour.
    """
    k = min(k, len(bank) - (own_index is not None))
    if k < 1:
        raise UserError(f"kNN needs at least one neighbour per query; the bank has {len(bank)}")
    rows = max(1, _SIMILARITIES // len(bank))
    found = []
    for start in range(0, len(queries), rows):
        similarity = queries[start : start + rows] @ bank.T  # (n, M)
        if own_index is not None:
            similarity.scatter_(1, own_index[start : start + rows, None], -torch.inf)
        found.append(_largest(similarity, k))
    if not found:
        return queries.new_empty(0, k), torch.empty(0, k, dtype=torch.int64, device=bank.device)
    nearest, index = zip(*found, strict=True)
    return torch.cat(nearest), torch.cat(index)


def _largest(similarity: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, of equal ones the first: `topk` takes any of them."""
    values, index = similarity.topk(k, dim=1)
    index, order = index.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    index = index.gather(1, order)
    tied = (similarity >= values[:, -1:]).sum(dim=1) > k  # some as large as the last are left out
    if tied.any():
        ranked = similarity[tied].sort(dim=1, descending=True, stable=True)
        values[tied], index[tied] = ranked.values[:, :k], ranked.indices[:, :k]
    return values, index


def rank_by_votes(
    similarity: Tensor, labels: Tensor, *, temperature: float, num_classes: int
) -> Tensor:
    """Rank the classes of each query by the votes of its neighbours.

    A neighbour with cosine similarity s votes exp(s / T) for its label (Sec. 3.4 of the paper).

    Args:
        similarity: float (N, k) of the neighbours, falling.
        labels: int64 (N, k) in [0, num_classes), theirs.
        temperature: T > 0.

    Returns:
        int64 (N, num_classes), classes by falling votes; of equal votes, the lower number first.
    """
    votes = similarity.new_zeros(len(similarity), num_classes)
    # Relative to the nearest, which ranks the same and cannot overflow.
    weights = ((similarity - similarity[:, :1]) / temperature).exp()
    votes.scatter_add_(1, labels, weights)
    return votes.argsort(dim=1, descending=True, stable=True)


@torch.no_grad()
def knn_predict(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    *,
    k: int,
    temperature: float,
    num_classes: int,
    own_index: Tensor | None = None,
) -> Tensor:
    """Rank the classes of each query by the votes of its k nearest neighbours.

    Args:
        bank, queries, k, own_index: see :func:`nearest_neighbours`.
        bank_labels: int64 (M,) in [0, num_classes).
        temperature: see :func:`rank_by_votes`.

    Returns:
        int64 (N, num_classes), classes by falling votes.
    """
    similarity, index = nearest_neighbours(bank, queries, k, own_index)
    return rank_by_votes(
        similarity, bank_labels[index], temperature=temperature, num_classes=num_classes
    )


def accuracy(ranked: Tensor, labels: Tensor, top: int) -> float:
    """Percentage of rows of `ranked` (N, classes) that name the label among the first `top`."""
    hits = (ranked[:, :top] == labels[:, None]).any(dim=1)
    return 100.0 * hits.sum().item() / len(labels)
