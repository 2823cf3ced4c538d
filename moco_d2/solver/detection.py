"""Optimizers of detectors: detectron2's SGD, or AdamW with a learning rate per layer of a ViT."""

from functools import partial

from detectron2.config import CfgNode
from detectron2.modeling.backbone.vit import get_vit_lr_decay_rate
from detectron2.solver import build_optimizer
from detectron2.solver.build import get_default_optimizer_params, maybe_add_gradient_clipping
from torch import nn
from torch.optim import Optimizer

from moco_d2.errors import UserError
from moco_d2.solver.build import OPTIMIZERS

KNOWN = ("SGD", "ADAMW")


def check_detector_solver(cfg: CfgNode) -> None:
    """Refuse an optimizer that detectors do not train with.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    solver = cfg.SOLVER
    if solver.OPTIMIZER not in KNOWN:
        raise UserError(
            f"SOLVER.OPTIMIZER is {solver.OPTIMIZER!r}; detectors train with {' or '.join(KNOWN)}"
        )
    if not 0.0 < solver.LAYER_DECAY <= 1.0:
        raise UserError(f"SOLVER.LAYER_DECAY is {solver.LAYER_DECAY}; it must lie in (0, 1]")
    vit = cfg.MODEL.BACKBONE.NAME == "build_vit_sfp_backbone"
    if solver.LAYER_DECAY != 1.0 and not (vit and solver.OPTIMIZER == "ADAMW"):
        raise UserError(
            f"SOLVER.LAYER_DECAY {solver.LAYER_DECAY:g} is for build_vit_sfp_backbone with "
            "SOLVER.OPTIMIZER ADAMW; set it to 1.0"
        )


def build_detector_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Build `SOLVER.OPTIMIZER` for a detector.

    With "ADAMW", block i of L in a ViT learns at `LAYER_DECAY` ^ (L - i) times the rate of what is
    behind the blocks, i from 0, and patches and positions at ^ (L + 1); positions are not decayed.
    That is how detectron2's ViTDet trains (`get_vit_lr_decay_rate`).

    Args:
        model: with `backbone`, not in DDP.
    """
    solver = cfg.SOLVER
    if solver.OPTIMIZER == "SGD":
        return build_optimizer(cfg, model)
    params = get_default_optimizer_params(
        model,
        base_lr=solver.BASE_LR,
        weight_decay_norm=solver.WEIGHT_DECAY_NORM,
        bias_lr_factor=solver.BIAS_LR_FACTOR,
        weight_decay_bias=solver.WEIGHT_DECAY_BIAS,
        lr_factor_func=partial(
            get_vit_lr_decay_rate,
            lr_decay_rate=solver.LAYER_DECAY,
            num_layers=cfg.MODEL.VIT.DEPTH,
        ),
        overrides={"pos_embed": {"weight_decay": 0.0}},
    )
    return maybe_add_gradient_clipping(cfg, OPTIMIZERS[solver.OPTIMIZER](params, solver))
