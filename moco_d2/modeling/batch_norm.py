"""Batch norm over groups of a stated number of images, however many processes they lie on."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from detectron2.layers import NaiveSyncBatchNorm
from detectron2.utils import comm
from fvcore.nn.precise_bn import get_bn_modules
from torch import Tensor, nn

from moco_d2.engine.distributed import all_reduce_mean_, neighbour_group
from moco_d2.errors import UserError


class BatchNormGroups:
    """How the images of a batch are divided into groups that share BN statistics.

    Group g of the global batch is the images at positions [gG, (g+1)G), G images each. A process
    that holds several groups normalises them side by side; a group larger than a process's share
    is synchronised over the processes that share it. Shared by all norm layers of an encoder.
    """

    def __init__(self, size: int, channels_last: bool = False, parts: int = 1):
        """
        Args:
            size: G, images per group; 0 stands for the whole global batch.
            channels_last: memory format of the activations, which decides how groups lie in them.
            parts: forwards that make up a step, each with whole groups; running statistics move
                once per step, as if there were one forward.
        """
        if size < 0 or size == 1:
            raise UserError(
                f"BN groups of {size} image(s): a group needs at least two images to have "
                "statistics (0 stands for the whole batch)"
            )
        self.size = size
        self.channels_last = channels_last
        self.parts = parts

    def split(self, num_images: int) -> tuple[int, int]:
        """How this process's images fall into groups.

        Args:
            num_images: images on this process, the same on each.

        Returns:
            (local groups, processes per group): one of the two is 1.

        Raises:
            ValueError: if groups do not tile the images.
        """
        size = self.size or num_images * comm.get_world_size()
        if num_images % size == 0:
            return num_images // size, 1
        if size % num_images == 0 and comm.get_world_size() % (size // num_images) == 0:
            return 1, size // num_images
        raise UserError(
            f"BN groups of {size} images do not tile {comm.get_world_size()} process(es) with "
            f"{num_images} images each: set MODEL.BN_GROUP_SIZE to a divisor or a multiple of "
            f"{num_images}"
        )

    def memory_order(self, num_images: int, device: torch.device) -> Tensor | None:
        """The order in which images must lie in memory so that no norm layer copies activations.

        One fused batch norm serves S groups when (N, C, H, W) is viewed as (N/S, S C, H, W):
        group g is then every S-th image. A channels-last tensor has no such view; there each
        group is a slice.

        Returns:
            int64 (N,) index into the images, or None when they can stay as they are.
        """
        groups, _ = self.split(num_images)
        if groups == 1 or self.channels_last:
            return None
        return torch.arange(num_images, device=device).view(groups, -1).T.reshape(-1)


class GroupedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose training statistics belong to groups of images.

    Input must lie in the order of :meth:`BatchNormGroups.memory_order`. Running statistics move
    towards the mean over the groups of this process; :func:`average_running_statistics_` makes
    them the mean over all. Parameters and buffers are named as torch's.
    """

    groups: BatchNormGroups
    _sums: Tensor  # (2, C), mean and variance of the step so far, divided by its parts
    _seen: Tensor  # int64 scalar, parts of the step so far

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> the same."""
        if not self.training:
            return super().forward(x)
        num_groups, span = self.groups.split(len(x))
        if span > 1:
            y, mean, var = self._normalise_synced(x, span)
        elif num_groups == 1 or not self._groups_are_slices:
            y, mean, var = self._normalise_interleaved(x, num_groups)
        else:
            y, mean, var = self._normalise_slices(x, num_groups)
        self._move_running_statistics(mean, var)
        return y

    @property
    def _groups_are_slices(self) -> bool:
        return self.groups.channels_last

    @torch.no_grad()
    def _move_running_statistics(self, mean: Tensor, var: Tensor) -> None:
        """With the last part of a step, towards the mean over its parts."""
        weight, ends = self.momentum, 1
        if self.groups.parts > 1:
            # No `if` at the last part: compiled code would keep to what it met first.
            self._sums.add_(torch.stack((mean, var)), alpha=1 / self.groups.parts)
            ends = self._seen.add_(1).remainder_(self.groups.parts) == 0
            mean, var, weight = *self._sums, ends.to(mean.dtype) * weight
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(var, weight)
        self.num_batches_tracked.add_(ends)
        if self.groups.parts > 1:
            self._sums.masked_fill_(ends, 0)

    def _normalise_interleaved(self, x: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
        n, c, h, w = x.shape
        # With momentum 1 the "running" statistics are those of the batch, per group.
        mean, var = self._empty_statistics(num_groups)
        y = F.batch_norm(
            x.reshape(n // num_groups, num_groups * c, h, w) if num_groups > 1 else x,
            mean.view(-1),
            var.view(-1),
            self.weight.repeat(num_groups) if self.affine else None,
            self.bias.repeat(num_groups) if self.affine else None,
            training=True,
            momentum=1.0,
            eps=self.eps,
        )
        return y.view(n, c, h, w) if num_groups > 1 else y, mean.mean(0), var.mean(0)

    def _normalise_slices(self, x: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = self._empty_statistics(num_groups)
        y = torch.cat(
            [
                F.batch_norm(part, m, v, self.weight, self.bias, True, 1.0, self.eps)
                for part, m, v in zip(x.chunk(num_groups), mean, var, strict=True)
            ]
        )
        return y, mean.mean(0), var.mean(0)

    def _normalise_synced(self, x: Tensor, span: int) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = self.weight, self.bias
        if not self.affine:
            weight, bias = torch.ones_like(self.running_var), torch.zeros_like(self.running_mean)
        return _SyncedBatchNorm.apply(x, weight, bias, self.eps, neighbour_group(span), span)

    def _empty_statistics(self, num_groups: int) -> tuple[Tensor, Tensor]:
        shape = (num_groups, self.num_features)
        return self.running_mean.new_zeros(shape), self.running_var.new_ones(shape)


class GroupedBatchNorm1d(GroupedBatchNorm2d):
    """The same for (N, C), whose rows lie in the order of the images: (N, C) -> (N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :, None, None]).flatten(1)

    @property
    def _groups_are_slices(self) -> bool:
        return True


class _SyncedBatchNorm(torch.autograd.Function):
    """Batch norm of one group that lies on `group`'s processes, each with as many images."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, group, span):
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        x_hat = x.to(dtype)
        count = span * x.numel() // x.shape[1]
        mean = x_hat.sum((0, 2, 3))
        dist.all_reduce(mean, group=group)
        mean.div_(count)
        x_hat = x_hat - _per_channel(mean)
        # Squares of the centred values: E[x^2] - E[x]^2 would cancel where the mean is large.
        squares = x_hat.square().sum((0, 2, 3))
        dist.all_reduce(squares, group=group)
        inv_std = (squares / count + eps).rsqrt()
        x_hat = x_hat.mul_(_per_channel(inv_std))
        ctx.save_for_backward(x_hat, weight, inv_std)
        ctx.group, ctx.count = group, count
        y = torch.addcmul(_per_channel(bias), x_hat, _per_channel(weight)).to(x.dtype)
        var = squares / max(count - 1, 1)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx, grad_y, _mean, _var):
        x_hat, weight, inv_std = ctx.saved_tensors
        grad = grad_y.to(x_hat.dtype)
        grad_weight, grad_bias = (grad * x_hat).sum((0, 2, 3)), grad.sum((0, 2, 3))
        sums = torch.stack([grad_weight, grad_bias])
        dist.all_reduce(sums, group=ctx.group)
        sums.div_(ctx.count)
        # dL/dx = w / sigma (g - mean(g) - x_hat mean(g x_hat)), means over the whole group.
        grad_x = grad - _per_channel(sums[1]) - x_hat * _per_channel(sums[0])
        grad_x.mul_(_per_channel(weight * inv_std))
        return grad_x.to(grad_y.dtype), grad_weight, grad_bias, None, None, None


def _per_channel(x: Tensor) -> Tensor:
    return x.view(1, -1, 1, 1)


GROUPED = {nn.BatchNorm2d: GroupedBatchNorm2d, nn.BatchNorm1d: GroupedBatchNorm1d}


def group_batch_norms_(module: nn.Module, groups: BatchNormGroups) -> nn.Module:
    """Make every batch norm inside a module one over `groups`, in place; weights stay.

    Raises:
        ValueError: for a synchronised norm, whose own idea of a group would be overruled.
    """
    for name, child in module.named_modules():
        if isinstance(child, (nn.SyncBatchNorm, NaiveSyncBatchNorm)):
            raise UserError(
                f"{name} is a {type(child).__name__}: in pretraining MODEL.BN_GROUP_SIZE says "
                "which images share statistics (0: the whole batch, as SyncBN); set "
                "MODEL.RESNETS.NORM to 'BN'"
            )
        for plain, grouped in GROUPED.items():
            if isinstance(child, plain):
                child.__class__ = grouped
                child.groups = groups
                sums = torch.zeros_like(torch.stack((child.running_mean, child.running_var)))
                child.register_buffer("_sums", sums, persistent=False)
                child.register_buffer(
                    "_seen", torch.zeros_like(child.num_batches_tracked), persistent=False
                )
    return module


@torch.no_grad()
def average_running_statistics_(model: nn.Module) -> None:
    """Make the running statistics of every BN in training mode their mean over the processes.

    A collective. Running statistics are linear in the statistics of the groups, so for grouped BN
    this is exact: they become what one process with all groups would hold, and training goes on
    as if nothing had happened.
    """
    norms = get_bn_modules(model)
    if not norms or comm.get_world_size() == 1:
        return
    buffers = [b for m in norms for b in (m.running_mean, m.running_var)]
    flat = all_reduce_mean_(torch.cat(buffers))
    for buffer, mean in zip(buffers, flat.split([len(b) for b in buffers]), strict=True):
        buffer.copy_(mean)
