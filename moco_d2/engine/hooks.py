"""What pretraining adds to every step, one duty per hook."""

import math
from collections.abc import Callable, Sequence

from detectron2.engine import HookBase, hooks
from detectron2.utils import comm
from torch import nn

from moco_d2.checkpoint.checkpointer import AtomicCheckpointer
from moco_d2.engine.distributed import unwrap
from moco_d2.engine.scalars import ScalarBuffer, log_scalar
from moco_d2.engine.signals import Stopped
from moco_d2.errors import UserError
from moco_d2.modeling.batch_norm import average_running_statistics_


def _constant(momentum: float, progress: float) -> float:
    return momentum


def _half_cosine(momentum: float, progress: float) -> float:
    """1 - (1 - m) (1 + cos(pi t / T)) / 2: from m to 1 (MoCo v3, arXiv 2104.02057)."""
    return 1 - (1 - momentum) * (1 + math.cos(math.pi * progress)) / 2


MOMENTUM_SCHEDULES = {"constant": _constant, "cosine": _half_cosine}


def momentum_schedule(name: str) -> Callable[[float, float], float]:
    """A schedule of `MOMENTUM_SCHEDULES`: (m at the start, share of the run done) -> m now.

    Raises:
        UserError: there is none of this name.
    """
    if name not in MOMENTUM_SCHEDULES:
        raise UserError(
            f"MODEL.MOCO.MOMENTUM_SCHEDULE is {name!r}; known: {sorted(MOMENTUM_SCHEDULES)}"
        )
    return MOMENTUM_SCHEDULES[name]


class KeyEncoderUpdate(HookBase):
    """Ends each step of a model that has `finish_step`: enqueue, then the key encoder's update.

    Put it before the checkpointer, else a checkpoint holds the key encoder of one step ago.
    """

    def __init__(self, model: nn.Module, momentum: float, schedule: str = "constant"):
        """
        Args:
            model: MoCo or MoCoV3, or DDP around it.
            momentum: m at the first iteration.
            schedule: a key of `MOMENTUM_SCHEDULES`.
        """
        self._model = unwrap(model)
        self._momentum = momentum
        self._schedule = momentum_schedule(schedule)

    def after_step(self):
        momentum = self._schedule(self._momentum, self.trainer.iter / self.trainer.max_iter)
        self._model.finish_step(momentum)
        if self._model.key_encoder_follows:
            log_scalar("key_encoder_momentum", momentum)


def is_due(trainer, periods) -> bool:
    """Whether the iteration that just ended is a multiple of a period above 0, or the last, of
    the run or before it stops on a signal."""
    done = trainer.iter + 1
    ends = done >= trainer.max_iter or trainer.stop_signal
    return ends or any(p > 0 and done % p == 0 for p in periods)


class AverageRunningStatistics(HookBase):
    """Averages BN running statistics over the processes where they are about to be used: before
    a checkpoint and an evaluation. It must come before the hooks of those."""

    def __init__(self, model: nn.Module, *periods: int):
        """
        Args:
            periods: of checkpoints and evaluations, in iterations; 0: only after the last one.
        """
        self._model = model
        self._periods = periods

    def after_step(self):
        if is_due(self.trainer, self._periods):
            average_running_statistics_(self._model)


class ScalarWriter(HookBase):
    """Moves the scalars that wait on the device to the EventStorage before writers run."""

    def __init__(self, buffer: ScalarBuffer, *periods: int, watchers: Sequence = ()):
        """
        Args:
            periods: of writers and checkpoints, in iterations.
            watchers: `update(written, storage)` is called with what `ScalarBuffer.flush` returned.
        """
        self._buffer = buffer
        self._periods = periods
        self._watchers = watchers

    def before_step(self):
        self._buffer.iteration = self.trainer.iter

    def after_step(self):
        if is_due(self.trainer, self._periods):
            self._flush()

    def after_train(self):
        if comm.get_world_size() == 1:  # after an error other processes may not take part
            self._flush()

    def _flush(self):
        written = self._buffer.flush(self.trainer.storage)
        for watcher in self._watchers:
            watcher.update(written, self.trainer.storage)


class Checkpoints(HookBase):
    """Saves every so many iterations, at the end, and when a signal asks the run to stop; then it
    stops the run.

    What comes after it in the list of hooks is done when the run is resumed.
    """

    def __init__(self, checkpointer: AtomicCheckpointer, period: int):
        self._checkpointer = checkpointer
        self._period = period

    def after_step(self):
        trainer, done = self.trainer, self.trainer.iter + 1
        due = self._period > 0 and done % self._period == 0
        last = done >= trainer.max_iter
        if due or (trainer.stop_signal and not last):
            self._save(f"model_{trainer.iter:07d}")
        if last:
            self._save("model_final")
        if trainer.stop_signal:
            comm.synchronize()  # a launcher kills all processes as soon as one has ended
            raise Stopped(trainer.stop_signal)

    def _save(self, name: str) -> None:
        if comm.is_main_process():
            self._checkpointer.save(name, iteration=self.trainer.iter)


class Evaluation(hooks.EvalHook):
    """Evaluates every so many iterations and at the end, unless a signal has stopped the run or
    its last step has failed, which an error of the evaluation would hide."""

    def after_train(self):
        if not self.trainer.stop_signal and self.trainer.iter >= self.trainer.max_iter:
            super().after_train()


class UnreadableImagesCheck(HookBase):
    """Stops the run when too many of the images it has met cannot be read."""

    def __init__(self, counter, batch_size: int, period: int):
        """
        Args:
            counter: `moco_d2.data.build.UnreadableImages` of this process.
            batch_size: images per step, of all processes.
        """
        self._counter = counter
        self._batch_size = batch_size
        self._period = period

    def after_step(self):
        if is_due(self.trainer, [self._period]):
            self._counter.check((self.trainer.iter + 1) * self._batch_size)
