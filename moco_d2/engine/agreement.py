"""What all processes agree on in each step: go on, stop after it, or end before it is taken."""

import json
import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from detectron2.utils import comm
from torch import Tensor

from moco_d2.checkpoint.checkpointer import AtomicCheckpointer
from moco_d2.checkpoint.files import replaced_file
from moco_d2.engine.distributed import control_group
from moco_d2.engine.signals import stop_requested
from moco_d2.errors import UserError


class LossNotFinite(UserError, FloatingPointError):
    """Training has diverged. Every process raises it, in the same step."""

    on_all_processes = True


class Agreement:
    """Collects the losses of a step, and decides with all processes how to go on.

    Losses are copied from the device while it works on; :meth:`reach` waits for the copy of the
    last forward only, with the backward still under way.
    """

    def __init__(self):
        self.losses: list[float] = []
        self.stop_signal = 0  # on which all processes end after this step; 0: none
        self._copies: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None

    def watch(self, loss: Tensor) -> None:
        """Start to copy a loss of this step, a scalar, from its device."""
        loss = loss.detach()
        if loss.device.type == "cuda":
            copy = torch.empty((), dtype=loss.dtype, pin_memory=True)
            copy.copy_(loss, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
            loss = copy
        self._copies.append(loss)

    def reach(self) -> bool:
        """Whether the losses of all processes are finite. A collective, once in a step.

        It sets `losses`, those of this process, and `stop_signal`.
        """
        if self._copied is not None:
            self._copied.synchronize()
        copies, self._copies = self._copies, []
        self.losses = [float(loss) for loss in copies]
        verdict = [not all(map(math.isfinite, self.losses)), stop_requested()]
        if comm.get_world_size() > 1:
            shared = torch.tensor(verdict, dtype=torch.int64)
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=control_group())
            verdict = shared.tolist()
        self.stop_signal = verdict[1]
        return not verdict[0]


def not_finite(
    iteration: int,
    losses: Sequence[float],
    images: Sequence[str],
    folder: str,
    checkpointer: AtomicCheckpointer,
) -> LossNotFinite:
    """The error of a step with a loss that is not finite. A collective.

    The names of the step's images go to `not_finite_*.json` in `folder`.

    Args:
        losses: of this process, in this step.
        images: files of this process's share of the batch.
    """
    shares = comm.all_gather((list(losses), list(images)))
    bad = {
        rank: next(loss for loss in losses if not math.isfinite(loss))
        for rank, (losses, _) in enumerate(shares)
        if not all(map(math.isfinite, losses))
    }
    record = os.path.join(folder, f"not_finite_{iteration:07d}.json")
    if comm.is_main_process():
        os.makedirs(folder, exist_ok=True)
        with replaced_file(record) as aside, open(aside, "w") as f:
            processes = [{"losses": [str(x) for x in ls], "images": fs} for ls, fs in shares]
            json.dump({"iteration": iteration, "processes": processes}, f, indent=1)
    rank, loss = next(iter(bad.items()))
    good = comm.all_gather(checkpointer.last_finite() if comm.is_main_process() else None)[0]
    return LossNotFinite(
        f"the loss became {loss} at iteration {iteration} on process {rank} of {len(shares)}; "
        f"{f'the last good checkpoint is {good}' if good else 'no good checkpoint was saved'}; "
        f"the images of that step are listed in {record}. Lower SOLVER.BASE_LR or warm up longer; "
        "with float16, try SOLVER.AMP.PRECISION bfloat16"
    )
