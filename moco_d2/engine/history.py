"""Metrics across a resume: `metrics.json` reads as if the run had never stopped."""

import contextlib
import json
import os

from detectron2.utils.events import EventStorage


class ScalarHistory:
    """The part of the EventStorage that is still to be written, or that a smoothed value needs.

    A checkpoint holds it. Plain Python: `{"period": int, "scalars": {name: {"values": [[value,
    iteration], ...], "smooth": bool}}}`.
    """

    def __init__(self, trainer, period: int):
        """
        Args:
            trainer: its `storage` is read.
            period: of writers in iterations, which is the window of smoothing, too.
        """
        self._trainer = trainer
        self._period = period
        self._scalars: dict[str, dict] = {}

    def written(self, iteration: int) -> int:
        """The last iteration that writers had written when that one was saved; -1: none."""
        return iteration - iteration % self._period - 1

    def state_dict(self) -> dict:
        storage: EventStorage = self._trainer.storage
        iteration = storage.iter
        hints = storage.smoothing_hints()
        scalars = {}
        for name, (_, latest) in storage.latest().items():
            if latest > self.written(iteration):
                values = storage.history(name).values()
                recent = [[v, i] for v, i in values if i > iteration - self._period]
                scalars[name] = {"values": recent, "smooth": hints[name]}
        return {"scalars": scalars}

    def load_state_dict(self, saved: dict) -> None:
        self._scalars = saved["scalars"]

    def restore(self, storage: EventStorage) -> None:
        """Put into the storage what was loaded."""
        for name, scalar in self._scalars.items():
            for value, iteration in scalar["values"]:
                storage.put_scalar(
                    name, value, smoothing_hint=scalar["smooth"], cur_iter=int(iteration)
                )
        self._scalars = {}


def forget_metrics(path: str, after: int | None) -> None:
    """Cut off a `metrics.json` where iterations above `after`, or half a line, begin.

    In place, since a writer may hold the file open. With None, only half a line is.
    """
    if not os.path.isfile(path):
        return
    end = position = 0
    with open(path, "rb") as f:
        for line in f:
            position += len(line)
            # What comes before the last line that stays may be of an earlier run: it stays, too.
            with contextlib.suppress(ValueError):
                whole = line.endswith(b"\n")
                if whole and (after is None or json.loads(line)["iteration"] <= after):
                    end = position
    os.truncate(path, end)
