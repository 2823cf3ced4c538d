"""Proof that what is frozen stays frozen: every tensor bit for bit as at the start."""

import hashlib

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm
from torch import nn

from moco_d2.checkpoint.verify import shown
from moco_d2.engine.hooks import is_due
from moco_d2.errors import UserError


class FrozenTensorsChanged(UserError):
    """A tensor that should be frozen is not what it was."""

    on_all_processes = True


class FrozenTensors(HookBase):
    """Compares the parameters and buffers of a module with what they were, on every process.

    It does so before every checkpoint and at the end, so that nothing is saved of a run in which
    one of them has changed. (MoCo's `main_lincls.py` does it for its parameters and buffers after
    each run.)
    """

    def __init__(self, module: nn.Module, *periods: int):
        """
        Args:
            module: all of it is frozen.
            periods: of checkpoints and evaluations, in iterations; 0: only after the last one.
        """
        self._module = module
        self._periods = periods
        self._digests: dict[str, str] | None = None

    def remember(self) -> None:
        """Take the tensors as they are for what they should be."""
        self._digests = _digests(self._module)

    def before_train(self):
        if self._digests is None:
            self.remember()

    def after_step(self):
        if is_due(self.trainer, self._periods):
            self.check(f"by iteration {self.trainer.iter}")

    def check(self, when: str) -> None:
        """A collective.

        Args:
            when: since the start, in words, for the error.

        Raises:
            FrozenTensorsChanged: tensors are not what they were, on this process or another. It
                names them.
        """
        now = _digests(self._module)
        mine = [name for name, digest in now.items() if self._digests[name] != digest]
        changed = sorted(set().union(*comm.all_gather(mine)))
        if changed:
            raise FrozenTensorsChanged(
                f"{len(changed)} of {len(now)} frozen tensors of the backbone differ from those "
                f"of the start {when}: {shown(changed)}; MODEL.CLASSIFIER.FREEZE_BACKBONE promises "
                "that none does: keep its batch norms in eval mode and its parameters out of the "
                "optimizer, and resume with the MODEL.WEIGHTS that the run began with"
            )


def _digests(module: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter and buffer: 32 bytes to remember in place of the tensor."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: _digest(tensor) for name, tensor in tensors.items()}


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy()).hexdigest()
