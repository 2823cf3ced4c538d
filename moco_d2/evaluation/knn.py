"""Weighted k-nearest-neighbour classification of frozen features (Wu et al., arXiv 1805.01978)."""

import torch
from torch import Tensor

from moco_d2.errors import UserError

_CHUNK = 4096  # queries per matrix product, which bounds memory


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

    A neighbour with cosine similarity s votes exp(s / T) for its label (Sec. 3.4 of the paper).

    Args:
        bank: float (M, C) L2-normalised features that vote.
        bank_labels: int64 (M,) in [0, num_classes).
        queries: float (N, C) L2-normalised.
        k: number of neighbours; more than the bank holds takes them all.
        temperature: T > 0.
        own_index: int64 (N,) row of the bank that is the query itself and must not vote.

    Returns:
        int64 (N, num_classes), classes by falling votes.
    """
    k = min(k, len(bank) - (own_index is not None))
    if k < 1:
        raise UserError(f"kNN needs at least one neighbour per query; the bank has {len(bank)}")
    ranked = []
    for start in range(0, len(queries), _CHUNK):
        similarity = queries[start : start + _CHUNK] @ bank.T  # (n, M)
        if own_index is not None:
            similarity.scatter_(1, own_index[start : start + _CHUNK, None], -torch.inf)
        nearest, index = similarity.topk(k, dim=1)  # (n, k)
        votes = similarity.new_zeros(len(similarity), num_classes)
        votes.scatter_add_(1, bank_labels[index], (nearest / temperature).exp())
        ranked.append(votes.argsort(dim=1, descending=True, stable=True))
    return torch.cat(ranked)


def accuracy(ranked: Tensor, labels: Tensor, top: int) -> float:
    """Percentage of rows of `ranked` (N, classes) that name the label among the first `top`."""
    return 100.0 * (ranked[:, :top] == labels[:, None]).any(dim=1).float().mean().item()
