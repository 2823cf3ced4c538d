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
        # When this process first saw a cell run, and how far it was.
        self._seen: dict[str, tuple[float, int]] = {}

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
        pace = self._paces(done, running)
        if not pace:
            return None
        overall = sum(pace.values()) / len(pace)
        left = [
            (cell.iterations - done[cell.name]) * pace.get(cell.group, overall)
            for cell in self._cells
            if cell.status is None
        ]
        return max(sum(left) / self._at_once, *left, 0.0)

    def _paces(self, done: dict[str, int], running: Sequence[Cell]) -> dict[str, float]:
        begun = [(cell, *self._seen[cell.name]) for cell in running if cell.name in self._seen]
        now = time.monotonic()
        recent = [
            (cell.group, now - since, done[cell.name] - before)
            for cell, since, before in begun
            if done[cell.name] > before
        ]
        return paces(self._cells, recent)


def paces(cells: Sequence[Cell], recent: Sequence[tuple[str, float, int]] = ()) -> dict[str, float]:
    """Seconds per iteration by group, of the finished cells and of what else was measured.

    Args:
        recent: (group, seconds, iterations).
    """
    seconds, iterations = defaultdict(float), defaultdict(int)
    finished = [(c.group, c.seconds(), c.iterations) for c in cells if c.status == DONE]
    for group, spent, made in [*finished, *recent]:
        seconds[group] += spent
        iterations[group] += made
    return {group: seconds[group] / made for group, made in iterations.items() if made}


def duration(seconds: float) -> str:
    """12 s, 3 min, 2 h 05 min, 4 d 3 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
