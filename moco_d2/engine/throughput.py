"""Images per second, and whether it is the loader that a run waits for."""

import os

from detectron2.engine import HookBase

from moco_d2.engine.alarms import Alarms

# Share of a step that may be spent waiting for images; beyond, the loader decides the speed.
_WAITING = 0.2


class Throughput(HookBase):
    """Logs images per second of this process; alarm when the loader is the bottleneck.

    Steps and waits are the medians of a period, so that a slow start of the workers or a save
    counts little. It comes after the hooks that log `time` and `data_time`.
    """

    def __init__(self, images: int, period: int, num_workers: int, processes: int, alarms: Alarms):
        """
        Args:
            images: per step, of this process.
            period: iterations between two looks.
            num_workers: loader workers of this process.
            processes: training processes of this machine.
        """
        self._images = images
        self._period = period
        self._num_workers = num_workers
        self._processes = processes
        self._alarms = alarms

    def after_step(self):
        done = self.trainer.iter + 1
        if done % self._period and done < self.trainer.max_iter:
            return
        histories = self.trainer.storage.histories()
        if "time" not in histories or "data_time" not in histories:
            return
        step = histories["time"].median(self._period)
        waiting = histories["data_time"].median(self._period)
        self.trainer.storage.put_scalar(
            "[metric]images_per_second", self._images / step, smoothing_hint=False
        )
        started = done - self.trainer.start_iter > self._period  # the first period is the start's
        if started and waiting > _WAITING * step:
            self._alarms.sound("loader", self._message(waiting, step))

    def _message(self, waiting: float, step: float) -> str:
        cores = len(os.sched_getaffinity(0)) // self._processes
        remedy = f"raise DATALOADER.NUM_WORKERS, now {self._num_workers}"
        if self._num_workers >= cores:
            remedy = (
                f"the {self._num_workers} loader workers of this process (DATALOADER.NUM_WORKERS) "
                f"already have no more than {cores} cores; keep decoded images with "
                "DATALOADER.CACHE, or store smaller ones"
            )
        return (
            f"The loader is the bottleneck: {waiting:.3f} s of a step of {step:.3f} s wait for "
            f"images. To go faster, {remedy}."
        )
