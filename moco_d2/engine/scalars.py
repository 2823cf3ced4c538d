"""Scalars of a step, kept on the device until they are written: no wait for the GPU per step."""

from collections import defaultdict

import torch
from detectron2.utils import comm
from detectron2.utils.events import EventStorage, get_event_storage, has_event_storage
from torch import Tensor

from moco_d2.engine.distributed import all_reduce_mean_

_active: list["ScalarBuffer"] = []


class ScalarBuffer:
    """Collects scalars of several iterations and hands them to detectron2's EventStorage at once.

    While it is active (`with buffer:`), :func:`log_scalar` writes into it.
    """

    def __init__(self):
        # (name, iteration) -> values: several where a step has several parts.
        self._scalars: dict[tuple[str, int], list[Tensor | float]] = defaultdict(list)
        self.iteration = 0

    def __enter__(self) -> "ScalarBuffer":
        _active.append(self)
        return self

    def __exit__(self, *_) -> None:
        _active.remove(self)

    def put(self, name: str, value: Tensor | float) -> None:
        """Keep a scalar of the current iteration; a tensor is not read before :meth:`flush`.

        Put several times in an iteration, it counts as the mean.
        """
        if isinstance(value, Tensor):
            value = value.detach()
        self._scalars[name, self.iteration].append(value)

    def flush(self, storage: EventStorage) -> dict[str, list[tuple[int, float]]]:
        """Average over the processes, and put every value in the storage with its iteration.

        A collective: every process has put the same names equally often.

        Returns:
            the averaged values by name, as (iteration, value).
        """
        scalars, self._scalars = self._scalars, defaultdict(list)
        if not scalars:
            return {}
        entries = sorted(scalars)
        put = (value for values in scalars.values() for value in values)
        device = next((value.device for value in put if isinstance(value, Tensor)), "cpu")
        values = [
            torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in parts])
            for parts in (scalars[entry] for entry in entries)
        ]
        means = all_reduce_mean_(torch.stack([value.mean() for value in values])).tolist()
        written = defaultdict(list)
        for (name, iteration), mean in zip(entries, means, strict=True):
            written[name].append((iteration, mean))
            if comm.is_main_process():
                storage.put_scalar(name, mean, cur_iter=iteration)
        return written


def log_scalar(name: str, value: Tensor | float) -> None:
    """Log a scalar of the current training step.

    Under this project's trainers the value stays on its device until metrics are written; under
    any other detectron2 trainer it goes to the EventStorage at once; outside training nowhere.
    """
    if _active:
        _active[-1].put(name, value)
    elif has_event_storage():
        get_event_storage().put_scalar(name, float(value))
