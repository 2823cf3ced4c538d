"""Heads: what maps a backbone's pooled features to the space of the loss, and v3's predictor."""

from torch import nn

from moco_d2.errors import UserError


def _linear(in_dim: int, hidden_dim: int, out_dim: int, layers: int) -> nn.Module:
    """MoCo v1: one fully connected layer."""
    return nn.Linear(in_dim, out_dim)


def _mlp(in_dim: int, hidden_dim: int, out_dim: int, layers: int) -> nn.Module:
    """MoCo v2 (arXiv 2003.04297): hidden layers with a ReLU, no norm."""
    parts: list[nn.Module] = []
    for width in (hidden_dim,) * (layers - 1):
        parts += [nn.Linear(in_dim, width), nn.ReLU(inplace=True)]
        in_dim = width
    return nn.Sequential(*parts, nn.Linear(in_dim, out_dim))


def _mlp_bn(
    in_dim: int, hidden_dim: int, out_dim: int, layers: int, last_norm: bool = True
) -> nn.Module:
    """MoCo v3 (arXiv 2104.02057, App. A, and its code): linear layers without bias, each followed
    by a batch norm; a ReLU between them, and after the last layer a norm without scale and shift.
    """
    parts: list[nn.Module] = []
    for width in (hidden_dim,) * (layers - 1):
        parts += [
            nn.Linear(in_dim, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(inplace=True),
        ]
        in_dim = width
    parts.append(nn.Linear(in_dim, out_dim, bias=False))
    if last_norm:
        parts.append(nn.BatchNorm1d(out_dim, affine=False))
    return nn.Sequential(*parts)


PROJECTION_HEADS = {"linear": _linear, "mlp": _mlp, "mlp_bn": _mlp_bn}


def build_projection_head(
    kind: str, in_dim: int, hidden_dim: int, out_dim: int, layers: int = 2
) -> nn.Module:
    """Build a head (N, in_dim) -> (N, out_dim).

    Args:
        kind: a key of `PROJECTION_HEADS`.
        hidden_dim: width of an MLP's hidden layers; 0 takes `in_dim`.
        layers: of an MLP.

    Raises:
        UserError: see :func:`check_projection_head`.
    """
    check_projection_head(kind, hidden_dim, out_dim, layers)
    return PROJECTION_HEADS[kind](in_dim, hidden_dim or in_dim, out_dim, layers)


def check_projection_head(kind: str, hidden_dim: int, out_dim: int, layers: int) -> None:
    """
    Raises:
        UserError: for an unknown kind, an MLP of less than two layers, or one without width.
    """
    if kind not in PROJECTION_HEADS:
        raise UserError(f"MODEL.MOCO.HEAD is {kind!r}; known: {sorted(PROJECTION_HEADS)}")
    if layers < 2:
        raise UserError(
            f"MODEL.MOCO.HEAD_LAYERS is {layers}; an MLP has at least 2 (a head of one layer is "
            "MODEL.MOCO.HEAD linear)"
        )
    if out_dim < 1 or hidden_dim < 0:
        raise UserError(
            f"MODEL.MOCO.DIM is {out_dim} and MLP_DIM {hidden_dim}: give a DIM of at least 1, and "
            "an MLP_DIM above 0, or 0 for that of the head's input"
        )


def build_predictor(dim: int, hidden_dim: int, last_norm: bool) -> nn.Module:
    """MoCo v3's prediction head (N, dim) -> (N, dim), two layers as in its projector.

    Args:
        hidden_dim: width of the hidden layer; 0 takes `dim`.
        last_norm: end in a batch norm. The official code does with a ViT, not with a ResNet.
    """
    return _mlp_bn(dim, hidden_dim or dim, dim, 2, last_norm)
