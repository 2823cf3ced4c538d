"""InfoNCE against a dictionary, without the (K + 1)-wide matrix of logits, and within a batch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class InfoNCE(NamedTuple):
    """What :func:`info_nce` returns."""

    loss: Tensor  # scalar, mean over the queries
    rank: Tensor  # int64 (N,): how many negatives score at least as high as the positive


class _InfoNCEFunction(torch.autograd.Function):
    """The loss and, in the same pass, its analytic gradient with respect to the queries.

    With p_j the softmax weight of key j among the K + 1 keys, dL_i/dq_i =
    (sum_j p_j key_j - k_i) / tau. Computing it at once frees the (N, K) logits and lets the
    caller overwrite the dictionary before `backward`.
    """

    @staticmethod
    def forward(ctx, q, k, negatives, temperature):
        l_pos = (q * k).sum(dim=1) / temperature  # (N,)
        logits = (q @ negatives.T).div_(temperature)  # (N, K)
        log_normalizer = torch.logaddexp(l_pos, torch.logsumexp(logits, dim=1))  # (N,)
        loss = (log_normalizer - l_pos).mean()
        rank = (logits >= l_pos[:, None]).sum(dim=1)
        if ctx.needs_input_grad[0]:
            p_neg = logits.sub_(log_normalizer[:, None]).exp_()  # (N, K), in place
            p_pos = (l_pos - log_normalizer).exp()  # (N,)
            grad_q = p_neg @ negatives + (p_pos - 1)[:, None] * k
            ctx.save_for_backward(grad_q.div_(temperature * len(q)))
        ctx.mark_non_differentiable(rank)
        return loss, rank

    @staticmethod
    def backward(ctx, grad_loss, _):
        (grad_q,) = ctx.saved_tensors
        return grad_loss * grad_q, None, None, None


def info_nce(q: Tensor, k: Tensor, negatives: Tensor, temperature: float) -> InfoNCE:
    """Contrastive loss of queries against one positive key each and the keys of a dictionary.

    L = mean_i -log( exp(q_i.k_i / tau) / (exp(q_i.k_i / tau) + sum_j exp(q_i.n_j / tau)) ),
    Eq. 1 of the MoCo paper (arXiv 1911.05722). Computed in float32, or in float64 when the
    queries are float64, whatever autocast says.

    Args:
        q: (N, C) L2-normalised queries.
        k: (N, C) L2-normalised positive keys, without gradient.
        negatives: (K, C) L2-normalised keys of the dictionary, without gradient. They may be
            overwritten as soon as this function has returned.
        temperature: tau > 0.

    Raises:
        ValueError: if shapes disagree, or keys require a gradient, which this loss does not give.
    """
    if q.shape != k.shape or q.shape[1:] != negatives.shape[1:]:
        raise ValueError(
            f"info_nce needs q (N, C), k (N, C) and negatives (K, C); got {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(negatives.shape)}"
        )
    if k.requires_grad or negatives.requires_grad:
        raise ValueError("info_nce gives no gradient to keys: detach them, or encode without grad")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        return InfoNCE(
            *_InfoNCEFunction.apply(
                q.to(dtype), k.to(dtype), negatives.to(dtype), float(temperature)
            )
        )


def in_batch_info_nce(q: Tensor, keys: Tensor, first: int, temperature: float) -> InfoNCE:
    """Contrastive loss of queries against the keys of a batch, one of which is their own.

    L = mean_i -log( exp(q_i.k_p(i) / tau) / sum_j exp(q_i.k_j / tau) ), p(i) = first + i: the `ctr`
    of Algorithm 1 of MoCo v3 (arXiv 2104.02057) without its factor 2 tau. Precision as for
    :func:`info_nce`.

    Args:
        q: (N, C) L2-normalised queries.
        keys: (B, C) L2-normalised keys, in which those of the queries stand together.
        first: row of the first query's own key.
        temperature: tau > 0.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        logits = q.to(dtype) @ keys.to(dtype).T / temperature  # (N, B)
        own = torch.arange(first, first + len(q), device=q.device)
        loss = F.cross_entropy(logits, own)
        scores = logits.detach()
        rank = (scores >= scores.gather(1, own[:, None])).sum(dim=1) - 1
        return InfoNCE(loss, rank)
