"""The two layers that detectron2's ViT takes from timm, so that it is built without timm."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import Tensor, nn

# Where detectron2 imports them from, while a block is built. timm calls it deprecated.
_TIMM = "timm.models.layers"


class Mlp(nn.Module):
    """Two linear layers with an activation between them, named as timm's."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        act_layer: Callable[[], nn.Module] = nn.GELU,
    ):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> the same."""
        return self.fc2(self.act(self.fc1(x)))


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): in training, leaves a residual branch out, per image."""

    def __init__(self, drop_prob: float):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        """(N, ...) -> the same; branches that stay are scaled so that the mean is unchanged."""
        if not self.training:
            return x
        keep = 1 - self.drop_prob
        stays = x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * (stays / keep)

    def extra_repr(self) -> str:
        return f"{self.drop_prob:g}"


@contextmanager
def without_timm() -> Iterator[None]:
    """While this is entered, detectron2's blocks are built of the layers above.

    Also where timm is installed: importing it takes seconds, and the module that detectron2 asks
    for is one that newer releases may no longer have.
    """
    stand_in = ModuleType(_TIMM)
    stand_in.Mlp, stand_in.DropPath = Mlp, DropPath
    before = sys.modules.get(_TIMM)
    sys.modules[_TIMM] = stand_in
    try:
        yield
    finally:
        if before is None:
            del sys.modules[_TIMM]
        else:
            sys.modules[_TIMM] = before
