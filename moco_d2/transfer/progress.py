"""How far all cells are, and how long they will take, in a line."""

import time
from collections import defaultdict
from collections.abc import Sequence

from moco_d2.transfer.cells import DONE, FAILED, Cell


class Progress:
    """Prints a line over all cells, every so often while runs go on.

    The time left is that of the remaining iterations at the pace of the cells so far, of their own
    group where it has any, evaluation and start included.
    """

    def __init__(self, cells: Sequence[Cell], at_once: int, seconds: float = 10.0):
        """
        Args:
            cells: all of them.
            at_once: cells that run at the same time.
            seconds: between two lines.
        """
        self._cells = cells
        self._at_once = at_once
        self._seconds = seconds
        self._printed = time.monotonic()
        # Where a cell was when this process first saw it run.
        self._seen: dict[str, tuple[float, int]] = {}
        self._pace: dict[str, tuple[float, int]] = {}

    def watch(self, running: list[Cell]) -> None:
        """Print a line if it is time for one."""
        now = time.monotonic()
        for cell in running:
            if cell.name not in self._seen:
                self._seen[cell.name] = (now, cell.iterations_done())
        if now - self._printed >= self._seconds:
            self._printed = now
            print(self.line(running), flush=True)

    def line(self, running: Sequence[Cell] = ()) -> str:
        status = [cell.status for cell in self._cells]
        done = {cell.name: cell.iterations_done() for cell in self._cells}
        parts = [f"{status.count(DONE)} of {len(status)} cells done"]
        if FAILED in status:
            parts.append(f"{status.count(FAILED)} failed")
        parts += [f"{cell.name} {done[cell.name]}/{cell.iterations}" for cell in running]
        left = self._seconds_left(done, running)
        if left is not None:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

    def _seconds_left(self, done: dict[str, int], running: Sequence[Cell]) -> float | None:
        paces = self._paces(done, running)
        if not paces:
            return None
        overall = sum(paces.values()) / len(paces)
        left = [
            (cell.iterations - done[cell.name]) * paces.get(cell.group, overall)
            for cell in self._cells
            if cell.status is None
        ]
        return max([sum(left) / self._at_once, *left[:1]]) if left else 0.0

    def _paces(self, done: dict[str, int], running: Sequence[Cell]) -> dict[str, float]:
        """Seconds per iteration by group."""
        seconds, iterations = defaultdict(float), defaultdict(int)
        for cell in self._cells:
            if cell.status == DONE and cell.iterations:
                seconds[cell.group] += cell.seconds()
                iterations[cell.group] += cell.iterations
        for cell in running:
            begun, before = self._seen[cell.name]
            if done[cell.name] > before:
                seconds[cell.group] += time.monotonic() - begun
                iterations[cell.group] += done[cell.name] - before
        return {group: seconds[group] / n for group, n in iterations.items()}


def duration(seconds: float) -> str:
    """12 s, 3 min, 2 h 05 min, 4 d 3 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
