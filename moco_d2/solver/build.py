"""Optimizers of pretraining, by name."""

import torch
from detectron2.config import CfgNode
from detectron2.solver.build import get_default_optimizer_params, maybe_add_gradient_clipping
from torch import nn
from torch.optim import Optimizer

from moco_d2.errors import UserError
from moco_d2.solver.lars import LARS


def _sgd(params: list[dict], solver: CfgNode) -> Optimizer:
    return torch.optim.SGD(
        params,
        solver.BASE_LR,
        momentum=solver.MOMENTUM,
        nesterov=solver.NESTEROV,
        weight_decay=solver.WEIGHT_DECAY,
        foreach=True,
    )


def _adamw(params: list[dict], solver: CfgNode) -> Optimizer:
    return torch.optim.AdamW(params, solver.BASE_LR, weight_decay=solver.WEIGHT_DECAY, foreach=True)


def _lars(params: list[dict], solver: CfgNode) -> Optimizer:
    return LARS(params, solver.BASE_LR, solver.MOMENTUM, solver.WEIGHT_DECAY)


OPTIMIZERS = {"SGD": _sgd, "LARS": _lars, "ADAMW": _adamw}


def build_pretrain_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Build the optimizer `SOLVER.OPTIMIZER` over the parameters that take a gradient.

    Weight decay of norms and biases and gradient clipping are detectron2's
    (`SOLVER.WEIGHT_DECAY_NORM`, `WEIGHT_DECAY_BIAS`, `CLIP_GRADIENTS`).
    """
    solver = cfg.SOLVER
    check_optimizer(solver)
    params = get_default_optimizer_params(
        model,
        base_lr=solver.BASE_LR,
        weight_decay_norm=solver.WEIGHT_DECAY_NORM,
        bias_lr_factor=solver.BIAS_LR_FACTOR,
        weight_decay_bias=solver.WEIGHT_DECAY_BIAS,
    )
    return maybe_add_gradient_clipping(cfg, OPTIMIZERS[solver.OPTIMIZER](params, solver))


def check_optimizer(solver: CfgNode) -> None:
    """
    Raises:
        UserError: `OPTIMIZER` is not known.
    """
    if solver.OPTIMIZER not in OPTIMIZERS:
        raise UserError(
            f"SOLVER.OPTIMIZER is {solver.OPTIMIZER!r}; known: {', '.join(sorted(OPTIMIZERS))}"
        )
