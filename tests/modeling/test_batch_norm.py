"""Grouped BN against float64 NumPy, in one process and synchronised over two."""

import numpy as np
import pytest
import torch
from support import run_processes
from torch import nn

from moco_d2.modeling.batch_norm import (
    BatchNormGroups,
    GroupedBatchNorm2d,
    average_running_statistics_,
    group_batch_norms_,
)

EPS, MOMENTUM = 1e-5, 0.1


def reference(x, weight, bias, grad_y, group):
    """Forward, gradients and running statistics per group of consecutive images, in float64.

    Ioffe and Szegedy, arXiv 1502.03167, Algorithm 1 and its derivatives.
    """
    y, grad_x = np.empty_like(x), np.empty_like(x)
    grad_w, grad_b, means, variances = 0, 0, [], []
    w, b = weight[None, :, None, None], bias[None, :, None, None]
    for start in range(0, len(x), group):
        part, g = x[start : start + group], grad_y[start : start + group]
        axes = (0, 2, 3)
        mean, var = part.mean(axes, keepdims=True), part.var(axes, keepdims=True)
        hat = (part - mean) / np.sqrt(var + EPS)
        y[start : start + group] = hat * w + b
        grad_w, grad_b = grad_w + (g * hat).sum(axes), grad_b + g.sum(axes)
        grad_x[start : start + group] = (w / np.sqrt(var + EPS)) * (
            g - g.mean(axes, keepdims=True) - hat * (g * hat).mean(axes, keepdims=True)
        )
        count = part.size // part.shape[1]
        means.append(mean.ravel())
        variances.append(var.ravel() * count / (count - 1))
    running_mean = MOMENTUM * np.mean(means, 0)
    running_var = (1 - MOMENTUM) + MOMENTUM * np.mean(variances, 0)
    return y, grad_x, grad_w, grad_b, running_mean, running_var


def make_case(n, c=5, size=4, seed=0):
    rng = np.random.default_rng(seed)
    # A large mean: naive E[x^2] - E[x]^2 would lose digits.
    x = rng.standard_normal((n, c, size, size)) * rng.uniform(0.5, 3, (n, 1, 1, 1)) + 30
    return x, rng.uniform(0.5, 2, c), rng.standard_normal(c), rng.standard_normal(x.shape)


def make_norm(weight, bias, groups):
    norm = nn.Sequential(nn.BatchNorm2d(len(weight), eps=EPS, momentum=MOMENTUM)).double()
    group_batch_norms_(norm, groups)
    norm[0].weight.data.copy_(torch.from_numpy(weight))
    norm[0].bias.data.copy_(torch.from_numpy(bias))
    return norm[0]


def apply_norm(norm, x, grad_y):
    """Run in the order the encoder uses, and return results in the order of the images."""
    order = norm.groups.memory_order(len(x), torch.device("cpu"))
    order = torch.arange(len(x)) if order is None else order
    x = torch.from_numpy(x).requires_grad_()
    laid_out = x[order]
    if norm.groups.channels_last:
        laid_out = laid_out.contiguous(memory_format=torch.channels_last)
    y = norm(laid_out)[order.argsort()]
    y.backward(torch.from_numpy(grad_y))
    return y.detach().numpy(), x.grad.numpy()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("n", "group"), [(12, 4), (12, 3), (12, 2), (12, 12), (12, 0)])
def test_one_process_equals_the_reference(n, group, channels_last):
    x, weight, bias, grad_y = make_case(n)
    norm = make_norm(weight, bias, BatchNormGroups(group, channels_last))
    y, grad_x = apply_norm(norm, x, grad_y)
    expected = reference(x, weight, bias, grad_y, group or n)
    got = (
        y,
        grad_x,
        norm.weight.grad.numpy(),
        norm.bias.grad.numpy(),
        norm.running_mean.numpy(),
        norm.running_var.numpy(),
    )
    for value, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-9)
    assert int(norm.num_batches_tracked) == 1


def head_case(n, affine):
    """Rows of features, as a head's norm sees them, as images of one pixel for the reference."""
    x, weight, bias, grad_y = make_case(n, size=1)
    return (x, weight, bias, grad_y) if affine else (x, np.ones(5), np.zeros(5), grad_y)


def apply_head_norm(group, x, weight, bias, grad_y, affine):
    """Results in the order of :func:`reference`; without scale and shift no gradients of them."""
    norm = nn.Sequential(nn.BatchNorm1d(5, eps=EPS, momentum=MOMENTUM, affine=affine)).double()
    # Channels-last or not, rows of features lie as they are.
    (norm,) = group_batch_norms_(norm, BatchNormGroups(group, channels_last=group == 3))
    if affine:
        norm.weight.data.copy_(torch.from_numpy(weight))
        norm.bias.data.copy_(torch.from_numpy(bias))
    x = torch.from_numpy(x[:, :, 0, 0]).requires_grad_()
    y = norm(x)
    y.backward(torch.from_numpy(grad_y[:, :, 0, 0]))
    assert y.shape == x.shape
    average_running_statistics_(norm)
    grads = [p.grad.numpy() for p in (norm.weight, norm.bias)] if affine else [np.nan, np.nan]
    rows = [t.numpy()[:, :, None, None] for t in (y.detach(), x.grad)]
    return [*rows, *grads, norm.running_mean.numpy(), norm.running_var.numpy()]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("group", [4, 3, 0])
def test_norm_of_a_head_equals_the_reference(group, affine):
    case = head_case(12, affine)
    got = apply_head_norm(group, *case, affine)
    for value, wanted in zip(got, reference(*case, group or 12), strict=True):
        if not np.isnan(value).all():
            np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-9)


def _two_process_norm(group, n, folder):
    from detectron2.utils import comm

    rank = comm.get_rank()
    x, weight, bias, grad_y = make_case(n)
    mine = slice(rank * n // 2, (rank + 1) * n // 2)
    norm = make_norm(weight, bias, BatchNormGroups(group))
    y, grad_x = apply_norm(norm, x[mine], grad_y[mine])
    average_running_statistics_(norm)
    np.savez(
        f"{folder}/{rank}.npz",
        y=y,
        grad_x=grad_x,
        grad_w=norm.weight.grad,
        grad_b=norm.bias.grad,
        running_mean=norm.running_mean,
        running_var=norm.running_var,
    )
    x, weight, bias, grad_y = head_case(n, affine=False)
    head = apply_head_norm(group, x[mine], weight, bias, grad_y[mine], affine=False)
    np.savez(f"{folder}/head_{rank}.npz", *head)


@pytest.mark.parametrize("group", [12, 0, 3])
def test_two_processes_equal_the_reference(group, tmp_path):
    """A group that spans both processes (12, and 0 for all), and groups inside each."""
    n = 12
    run_processes(_two_process_norm, 2, group, n, str(tmp_path))
    ranks = [np.load(tmp_path / f"{rank}.npz") for rank in (0, 1)]
    y, grad_x, grad_w, grad_b, running_mean, running_var = reference(*make_case(n), group or n)
    np.testing.assert_allclose(np.concatenate([r["y"] for r in ranks]), y, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(
        np.concatenate([r["grad_x"] for r in ranks]), grad_x, rtol=1e-6, atol=1e-9
    )
    # Parameters' gradients are each process's part, which DDP adds up.
    np.testing.assert_allclose(sum(r["grad_w"] for r in ranks), grad_w, rtol=1e-6)
    np.testing.assert_allclose(sum(r["grad_b"] for r in ranks), grad_b, rtol=1e-6)
    for r in ranks:
        np.testing.assert_allclose(r["running_mean"], running_mean, rtol=1e-6)
        np.testing.assert_allclose(r["running_var"], running_var, rtol=1e-6)
    heads = [list(np.load(tmp_path / f"head_{rank}.npz").values()) for rank in (0, 1)]
    expected = reference(*head_case(n, affine=False), group or n)
    for i in (0, 1):
        joined = np.concatenate([h[i] for h in heads])
        np.testing.assert_allclose(joined, expected[i], rtol=1e-6, atol=1e-9)
    for h in heads:
        np.testing.assert_allclose(h[4], expected[4], rtol=1e-6)
        np.testing.assert_allclose(h[5], expected[5], rtol=1e-6)


def test_evaluation_uses_running_statistics_as_torch_does():
    x, weight, bias, grad_y = make_case(8)
    norm = make_norm(weight, bias, BatchNormGroups(4))
    apply_norm(norm, x, grad_y)
    norm.eval()
    plain = nn.BatchNorm2d(5).double().eval()
    plain.load_state_dict(norm.state_dict())
    assert torch.equal(norm(torch.from_numpy(x)), plain(torch.from_numpy(x)))


@pytest.mark.parametrize("make", [nn.SyncBatchNorm, "naive"])
def test_a_synchronised_norm_is_refused(make):
    from detectron2.layers import NaiveSyncBatchNorm

    module = nn.Sequential((NaiveSyncBatchNorm if make == "naive" else make)(4))
    with pytest.raises(ValueError, match="MODEL.BN_GROUP_SIZE"):
        group_batch_norms_(module, BatchNormGroups(2))


def test_groups_that_do_not_tile_are_refused():
    with pytest.raises(ValueError, match="BN groups of 5 images do not tile"):
        BatchNormGroups(5).split(12)
    with pytest.raises(ValueError, match="at least two images"):
        BatchNormGroups(1)


def test_state_dict_is_that_of_torch():
    norm = make_norm(np.ones(5), np.zeros(5), BatchNormGroups(2))
    assert isinstance(norm, GroupedBatchNorm2d)
    assert list(norm.state_dict()) == list(nn.BatchNorm2d(5).state_dict())


@pytest.mark.parametrize("compiled", [False, True])
def test_running_statistics_move_once_in_a_step_of_parts(compiled):
    """Three parts, two steps. Compiled code must not keep to the branches of its first call."""
    x, weight, bias, _ = make_case(12)
    norm = make_norm(weight, bias, BatchNormGroups(4, parts=3))
    forward = torch.compile(norm, backend="eager") if compiled else norm
    mean, var = np.zeros(5), np.ones(5)
    for step in (x, x + 1):
        parts = np.split(step, 3)
        for part in parts:
            np.testing.assert_allclose(norm.running_mean, mean, rtol=1e-6)  # not yet
            forward(torch.from_numpy(part))
        mean = 0.9 * mean + 0.1 * np.mean([p.mean((0, 2, 3)) for p in parts], 0)
        var = 0.9 * var + 0.1 * np.mean([p.var((0, 2, 3)) * 64 / 63 for p in parts], 0)
        np.testing.assert_allclose(norm.running_mean, mean, rtol=1e-6)
        np.testing.assert_allclose(norm.running_var, var, rtol=1e-6)
    assert int(norm.num_batches_tracked) == 2
