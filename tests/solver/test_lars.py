"""LARS against float64 NumPy, and v3's learning rate against the formula of its code."""

import copy
import math

import numpy as np
import pytest
import torch
from detectron2.solver import build_lr_scheduler
from support import tiny_pretrain_config
from torch import nn

from moco_d2.solver.build import build_pretrain_optimizer
from moco_d2.solver.lars import LARS

LR, MOMENTUM, DECAY, TRUST = 0.4, 0.9, 1e-2, 1e-3


def reference(weights, gradients_of_steps):
    """arXiv 1708.03888, Algorithm 1 in the form that MoCo v3 uses, w as a NumPy array."""
    weights = [w.copy() for w in weights]
    velocities = [np.zeros_like(w) for w in weights]
    for gradients in gradients_of_steps:
        for w, v, g in zip(weights, velocities, gradients, strict=True):
            update = g
            if w.ndim > 1:
                update = g + DECAY * w
                w_norm, u_norm = np.sqrt((w**2).sum()), np.sqrt((update**2).sum())
                if w_norm > 0 and u_norm > 0:
                    update = update * (TRUST * w_norm / u_norm)
            v[...] = MOMENTUM * v + update
            w[...] = w - LR * v
    return weights


@pytest.fixture
def case():
    """A matrix, a convolution, a bias, a scalar, a matrix of zeros and one without gradient."""
    rng = np.random.default_rng(0)
    shapes = [(4, 3), (2, 3, 3, 3), (5,), (), (2, 2), (3, 2)]
    weights = [np.asarray(rng.standard_normal(s)) for s in shapes]
    weights[4][...] = 0
    gradients = [[np.asarray(10 * rng.standard_normal(s)) for s in shapes] for _ in range(3)]
    for step in gradients:
        step[5][...] = 0
    return weights, gradients


def test_three_steps_equal_the_reference(case):
    weights, gradients = case
    params = [nn.Parameter(torch.from_numpy(w.copy())) for w in weights]
    idle = nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([*params, idle], LR, MOMENTUM, DECAY, TRUST)
    for step in gradients:
        for p, g in zip(params, step, strict=True):
            p.grad = torch.from_numpy(g.copy())
        optimizer.step()
        for p, g in zip(params, step, strict=True):
            assert np.array_equal(p.grad.numpy(), g)  # which may be logged or clipped elsewhere
    for p, expected in zip(params, reference(weights, gradients), strict=True):
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-12)
    assert torch.equal(idle, torch.ones(2, 2))


def test_it_goes_on_from_its_state(case):
    weights, gradients = case

    def steps(params, optimizer, some):
        for step in some:
            for p, g in zip(params, step, strict=True):
                p.grad = torch.from_numpy(g)
            optimizer.step()

    whole = [nn.Parameter(torch.from_numpy(w.copy())) for w in weights]
    steps(whole, LARS(whole, LR, MOMENTUM, DECAY), gradients)
    parts = [nn.Parameter(torch.from_numpy(w.copy())) for w in weights]
    first = LARS(parts, LR, MOMENTUM, DECAY)
    steps(parts, first, gradients[:1])
    second = LARS(parts, LR)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(parts, second, gradients[1:])
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_the_config_builds_it_with_its_own_momentum_and_decay():
    cfg = tiny_pretrain_config(
        SOLVER__OPTIMIZER="LARS",
        SOLVER__BASE_LR=0.3,
        SOLVER__WEIGHT_DECAY=1.5e-6,
        SOLVER__MOMENTUM=0.8,
    )
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = build_pretrain_optimizer(cfg, model)
    assert isinstance(optimizer, LARS)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == 4
    for group in optimizer.param_groups:
        assert (group["lr"], group["momentum"]) == (0.3, 0.8)
        assert group["trust_coefficient"] == 0.001
    decay = {p.ndim: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay[2] == 1.5e-6


def test_warm_up_and_cosine_per_iteration_are_those_of_v3():
    """lr t / W before W iterations, then lr (1 + cos(pi (t - W) / (T - W))) / 2 (main_moco.py of
    facebookresearch/moco-v3)."""
    total, warm_up, lr = 60, 12, 4.8
    cfg = tiny_pretrain_config(
        SOLVER__LR_SCHEDULER_NAME="WarmupCosineLR",
        SOLVER__WARMUP_FACTOR=0.0,
        SOLVER__RESCALE_INTERVAL=True,
        SOLVER__WARMUP_ITERS=warm_up,
        SOLVER__MAX_ITER=total,
        SOLVER__BASE_LR=lr,
        SOLVER__OPTIMIZER="LARS",
    )
    optimizer = build_pretrain_optimizer(cfg, nn.Linear(2, 2))
    scheduler = build_lr_scheduler(cfg, optimizer)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    expected = [
        (
            lr * t / warm_up
            if t < warm_up
            else lr * (1 + math.cos(math.pi * (t - warm_up) / (total - warm_up))) / 2
        )
        for t in range(total)
    ]
    np.testing.assert_allclose(rates, expected, rtol=1e-12, atol=1e-15)
