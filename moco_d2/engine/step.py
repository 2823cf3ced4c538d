"""One optimizer step, in one part or several, with mixed precision on any device."""

import contextlib
import time

import torch
from detectron2.engine import SimpleTrainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from moco_d2.engine.agreement import Agreement
from moco_d2.engine.distributed import unwrap
from moco_d2.engine.scalars import ScalarBuffer
from moco_d2.engine.signals import signals_kept_from_workers

PRECISIONS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class NotFinite(Exception):
    """A loss of this step is not finite, on this process or another; `batch` is this one's."""

    def __init__(self, batch):
        super().__init__("a loss is not finite")
        self.batch = batch


class Step(SimpleTrainer):
    """One optimizer step: detectron2's, with mixed precision on any device and without reading
    the loss back from the device every time."""

    def __init__(
        self,
        model,
        optimizer,
        scalars: ScalarBuffer,
        precision: torch.dtype | None = None,
        parts: int = 1,
    ):
        """
        Args:
            model: in DDP or not; with `split_step` when there are several parts.
            scalars: where losses and times are logged.
            precision: of autocast; None: no mixed precision.
            parts: forwards and backwards that make up a step.
        """
        super().__init__(model, data_loader=None, optimizer=optimizer)
        self.scalars = scalars
        self.parts = parts
        self.agreement = Agreement()
        self.device = unwrap(model).device
        self.precision = precision
        # bfloat16 has float32's range: only float16 needs its loss scaled.
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=precision == torch.float16 and self.device.type == "cuda"
        )

    def run_step(self):
        start = time.perf_counter()
        with signals_kept_from_workers():  # which start when the first batch is asked for
            data = next(self._data_loader_iter)
        data_time = time.perf_counter() - start
        self.optimizer.zero_grad()
        if self.parts == 1:
            self._forward_backward(data)
        else:
            with self._autocast():
                parts = unwrap(self.model).split_step(data, self.parts)
            for number, part in enumerate(parts, 1):
                with self._gradients_stay_here(number < self.parts):
                    self._forward_backward(part)
        if not self.agreement.reach():
            raise NotFinite(data)
        # Gradient clipping, which sits in the optimizer's step, must see true gradients.
        self.scaler.unscale_(self.optimizer)
        self.scalars.put("[metric]gradient_norm", self._gradient_norm())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scalars.put("data_time", data_time)

    def _forward_backward(self, data) -> None:
        with self._autocast():
            losses = self.model(data)
        total = sum(losses.values())
        self.agreement.watch(total)
        self.scaler.scale(total / self.parts).backward()
        for name, loss in {**losses, "total_loss": total}.items():
            self.scalars.put(name, loss)

    @torch.no_grad()
    def _gradient_norm(self) -> Tensor:
        """L2 norm of the gradient of all parameters together, a scalar on their device."""
        groups = self.optimizer.param_groups
        grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        return torch.stack(torch._foreach_norm(grads)).norm()

    def _autocast(self):
        if self.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.precision)

    def _gradients_stay_here(self, more_to_come: bool):
        """Processes exchange gradients with the last part of a step only."""
        if more_to_come and isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return contextlib.nullcontext()

    def state_dict(self):
        return {**super().state_dict(), "grad_scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.scaler.load_state_dict(state_dict["grad_scaler"])
