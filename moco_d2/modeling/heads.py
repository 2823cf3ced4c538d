"""Projection heads: what maps a backbone's pooled features to the space of the loss."""

from torch import nn

from moco_d2.errors import UserError


def _linear(in_dim: int, hidden_dim: int, out_dim: int) -> nn.Module:
    """MoCo v1: one fully connected layer."""
    return nn.Linear(in_dim, out_dim)


def _mlp(in_dim: int, hidden_dim: int, out_dim: int) -> nn.Module:
    """MoCo v2 (arXiv 2003.04297): one hidden layer with a ReLU, no norm."""
    return nn.Sequential(
        nn.Linear(in_dim, hidden_dim), nn.ReLU(inplace=True), nn.Linear(hidden_dim, out_dim)
    )


PROJECTION_HEADS = {"linear": _linear, "mlp": _mlp}


def build_projection_head(kind: str, in_dim: int, hidden_dim: int, out_dim: int) -> nn.Module:
    """Build a head (N, in_dim) -> (N, out_dim).

    Args:
        kind: a key of `PROJECTION_HEADS`.
        hidden_dim: width of the hidden layer of "mlp"; 0 takes `in_dim`.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind not in PROJECTION_HEADS:
        raise UserError(f"MODEL.MOCO.HEAD is {kind!r}; known: {sorted(PROJECTION_HEADS)}")
    return PROJECTION_HEADS[kind](in_dim, hidden_dim or in_dim, out_dim)
