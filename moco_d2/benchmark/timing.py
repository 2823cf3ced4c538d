"""Ways to do the same thing, timed in turns, and their table."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tabulate import tabulate


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat of one way."""

    name: str
    seconds: np.ndarray

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile."""
        low, high = np.percentile(self.seconds, [25, 75])
        return float(low), float(high)


def time_in_turns(
    ways: dict[str, Callable[[], object]],
    *,
    repeats: int,
    units: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Run every way once per repeat, so that a busy machine is as unfair to each.

    Args:
        ways: name -> what to time.
        repeats: after one run of each that is not counted.
        units: things that one call does; times are of one of them.
        clock: ``time.process_time`` counts this process's CPU alone.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, run in ways.items():
            start = clock()
            run()
            elapsed = clock() - start
            if repeat:
                seconds[name].append(elapsed / units)
    return {name: Timing(name, np.array(values)) for name, values in seconds.items()}


def ratio(timings: dict[str, Timing], slower: str, faster: str) -> float:
    """Median of the ratios of the repeats, in each of which both ran one after the other."""
    return float(np.median(timings[slower].seconds / timings[faster].seconds))


def timing_table(timings: dict[str, Timing], unit: str, ours: str) -> str:
    """A row per way: median and quartiles in milliseconds, and the ratio to this project's."""
    rows = [
        [
            timing.name,
            f"{timing.median * 1e3:.3f}",
            "{:.3f} - {:.3f}".format(*(s * 1e3 for s in timing.spread)),
            f"{ratio(timings, timing.name, ours):.2f}",
        ]
        for timing in timings.values()
    ]
    return tabulate(rows, ["", f"ms per {unit}", "quartiles", "ratio to ours"])
