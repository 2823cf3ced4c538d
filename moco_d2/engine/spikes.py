"""Counts how often loss and gradient jump: the instability that MoCo v3 is known for."""

import math
from statistics import median

from detectron2.utils import comm
from detectron2.utils.events import EventStorage

# What is watched -> the name that its count is logged by.
WATCHED = {
    "total_loss": "loss_spikes",
    "[metric]gradient_norm": "[metric]gradient_norm_spikes",
}


class SpikeCounter:
    """Counts the spikes of scalars, from what is logged: nothing more is read from the device.

    A value is a spike if it exceeds the median m of the 100 values before it by more than 10 times
    their median absolute deviation (or 1 % of m, whichever is more). In noise with a normal
    distribution that is 6.7 standard deviations. The first 100 values are not judged. A median
    hardly moves with a spike, so one does not hide the next, and stays where it was until the new
    level has lasted for 50 values. Values that are not finite are left out: mixed precision skips
    steps whose gradients overflow.
    """

    window = 100
    deviations = 10.0
    least = 0.01  # of the median

    def __init__(self):
        self._recent: dict[str, list[float]] = {name: [] for name in WATCHED}
        self.counts = dict.fromkeys(WATCHED, 0)

    def update(self, written: dict[str, list[tuple[int, float]]], storage: EventStorage) -> None:
        """Judge values in order and log the counts so far.

        Args:
            written: what `ScalarBuffer.flush` returned, the same on every process.
        """
        for name, count_name in WATCHED.items():
            for iteration, value in written.get(name, ()):
                self.counts[name] += self._is_spike(name, value)
                if comm.is_main_process():
                    storage.put_scalar(
                        count_name, self.counts[name], smoothing_hint=False, cur_iter=iteration
                    )

    def _is_spike(self, name: str, value: float) -> bool:
        if not math.isfinite(value):
            return False
        recent, judged = self._recent[name], False
        if len(recent) == self.window:
            level = median(recent)
            deviation = median(abs(x - level) for x in recent)
            judged = value > level + max(self.deviations * deviation, self.least * abs(level))
        self._recent[name] = [*recent, value][-self.window :]
        return judged

    def state_dict(self) -> dict:
        return {"recent": self._recent, "counts": self.counts}

    def load_state_dict(self, saved: dict) -> None:
        self._recent, self.counts = saved["recent"], saved["counts"]
