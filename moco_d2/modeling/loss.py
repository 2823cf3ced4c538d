"""InfoNCE, computed without building or keeping the (K + 1)-wide matrix of logits."""

from typing import NamedTuple

import torch
from torch import Tensor


class InfoNCE(NamedTuple):
    """What :func:`info_nce` returns."""

    loss: Tensor  # scalar, mean over the queries
    rank: Tensor  # int64 (N,): how many negatives score at least as high as the positive


class _InfoNCEFunction(torch.autograd.Function):
    """The loss and, in the same pass, its analytic gradient.

    With p_ij the softmax weight of key j among the K + 1 keys of query i, and p_i that of its
    positive, N tau times the gradients are: (p_i - 1) k_i + sum_j p_ij n_j for q_i, (p_i - 1) q_i
    for k_i, sum_i p_ij q_i for n_j. Computing them at once frees the (N, K) logits and lets the
    caller overwrite the dictionary before `backward`.
    """

    @staticmethod
    def forward(ctx, q, k, negatives, temperature, ids, negative_ids):
        l_pos = (q * k).sum(dim=1) / temperature  # (N,)
        logits = (q @ negatives.T).div_(temperature)  # (N, K)
        if ids is not None:
            logits.masked_fill_(ids[:, None] == negative_ids, -torch.inf)
        log_normalizer = torch.logaddexp(l_pos, torch.logsumexp(logits, dim=1))  # (N,)
        loss = (log_normalizer - l_pos).mean()
        rank = (logits >= l_pos[:, None]).sum(dim=1)
        ctx.mark_non_differentiable(rank)
        needed = ctx.needs_input_grad[:3]
        if any(needed):
            p_neg = logits.sub_(log_normalizer[:, None]).exp_()  # (N, K), in place
            pull = (l_pos - log_normalizer).expm1()[:, None]  # (N, 1), p_i - 1
            scale = 1 / (temperature * len(q))
            gradients = (
                lambda: torch.addmm(pull * k, p_neg, negatives),
                lambda: pull * q,
                lambda: p_neg.T @ q,
            )
            ctx.save_for_backward(
                *(
                    gradient().mul_(scale) if wanted else None
                    for gradient, wanted in zip(gradients, needed, strict=True)
                )
            )
        return loss, rank

    @staticmethod
    def backward(ctx, grad_loss, _):
        grads = (None if grad is None else grad_loss * grad for grad in ctx.saved_tensors)
        return (*grads, None, None, None)


def info_nce(
    q: Tensor,
    k: Tensor,
    negatives: Tensor,
    temperature: float,
    ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
) -> InfoNCE:
    """Contrastive loss of queries against one positive key each and the keys of a dictionary.

    L = mean_i -log( exp(q_i.k_i / tau) / (exp(q_i.k_i / tau) + sum_j exp(q_i.n_j / tau)) ),
    Eq. 1 of the MoCo paper (arXiv 1911.05722). Computed in float32, or in float64 when the
    queries are float64, whatever autocast says.

    Args:
        q: (N, C) L2-normalised queries.
        k: (N, C) L2-normalised positive keys.
        negatives: (K, C) L2-normalised keys of the dictionary. They may be overwritten as soon as
            this function has returned.
        temperature: tau > 0.
        ids, negative_ids: int64 (N,) and (K,), or None: negatives with the id of a query are left
            out of that query's sum.

    Raises:
        ValueError: if shapes disagree.
    """
    if q.shape != k.shape or q.shape[1:] != negatives.shape[1:]:
        raise ValueError(
            f"info_nce needs q (N, C), k (N, C) and negatives (K, C); got {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(negatives.shape)}"
        )
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        return InfoNCE(
            *_InfoNCEFunction.apply(
                q.to(dtype),
                k.to(dtype),
                negatives.to(dtype),
                float(temperature),
                ids,
                negative_ids,
            )
        )
