"""LARS: SGD with momentum whose step is as long, relative to each weight, as the lr says."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (arXiv 1708.03888), as MoCo v3 uses it for ResNets.

    For a weight w with gradient g, weight decay d, momentum mu and trust coefficient eta:
        u = g + d w;  u = u eta |w| / |u|  (as it is, where one of the norms is 0)
        v = mu v + u;  w = w - lr v
    What has one dimension or none (biases, scales and shifts of norms) is neither decayed nor
    adapted: u = g.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ):
        """
        Args:
            params: tensors, or groups of them with options of their own.
        """
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One step; `closure` recomputes the loss, as for any optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            if not given:
                continue
            weights = [p for p in given if p.ndim > 1]
            others = [p for p in given if p.ndim <= 1]
            params = weights + others
            updates = _adapted(weights, group) + [p.grad for p in others]
            velocities = [self._velocity(p) for p in params]
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, updates)
            torch._foreach_add_(params, velocities, alpha=-group["lr"])
        return loss

    def _velocity(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]


def _adapted(weights: list[Tensor], group: dict) -> list[Tensor]:
    """Their gradients, decayed and scaled. No number is read from the device."""
    if not weights:
        return []
    updates = torch._foreach_add([w.grad for w in weights], weights, alpha=group["weight_decay"])
    lengths = torch.stack(torch._foreach_norm(weights))
    update_lengths = torch.stack(torch._foreach_norm(updates))
    scales = group["trust_coefficient"] * lengths / update_lengths
    defined = (lengths > 0) & (update_lengths > 0)
    torch._foreach_mul_(updates, list(torch.where(defined, scales, 1.0).unbind()))
    return list(updates)
