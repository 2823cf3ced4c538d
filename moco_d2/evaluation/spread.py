"""How far features spread: collapse, of all dimensions or of most, shows here first."""

import math

import torch
from torch import Tensor


def feature_std(features: Tensor) -> Tensor:
    """Standard deviation per dimension, averaged, in units of what isotropic features have.

    Sec. 4.1 of SimSiam (arXiv 2011.10566): L2-normalised features that point everywhere have
    1 / sqrt(C) in each dimension, features that are all the same 0.

    Args:
        features: (N, C) L2-normalised.

    Returns:
        scalar, 0 (collapsed) to about 1 (isotropic).
    """
    return features.std(dim=0, correction=0).mean() * math.sqrt(features.shape[1])


def effective_rank(features: Tensor) -> Tensor:
    """RankMe (Eq. 1 and 2 of arXiv 2210.02885): how many dimensions features use.

    With p_i the i-th singular value over the sum of all, exp(- sum_i p_i log p_i).

    Args:
        features: (N, C), not centred.

    Returns:
        scalar, 1 (all on a line) to min(N, C) (all singular values equal).
    """
    values = torch.linalg.svdvals(features)
    total = values.sum().clamp(min=torch.finfo(values.dtype).tiny)  # all 0: rank 1
    p = values / total + 1e-7  # as the paper does, so that log is finite
    return (-(p * p.log()).sum()).exp()
