"""Running cells: each in processes of its own, some at a time, none left behind.

A cell that fails does not stop the others. The runner itself may be stopped or killed at any time:
its runs save and end with it, and the next start goes on in the middle of a cell.
"""

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moco_d2.checkpoint.files import sha256
from moco_d2.engine.signals import Stopped, stop_requested, stop_signals
from moco_d2.errors import UserError
from moco_d2.transfer.cells import DONE, Cell

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_SECONDS = 0.2
# How errors begin in a run's output: train_net.py's own, those of its log, Python's.
_ERROR = re.compile(r"(?:error: |ERROR (?:\[.*?\]: )?|\w[\w.]*(?:Error|Exception)(?:: |$))(.*)")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def run_cells(
    cells: Sequence[Cell],
    places: Sequence[Mapping[str, str]],
    *,
    watch: Callable[[list[Cell]], Any] = lambda running: None,
    ended: Callable[[Cell], Any] = lambda cell: None,
) -> list[Cell]:
    """Run what is not done yet, and go on where runs were stopped.

    Args:
        cells: in this order.
        places: environment variables of the runs that go on at the same time, one mapping each,
            such as which GPUs a run may use.
        watch: called several times a second with the running cells.
        ended: called with a cell once its cell.json is written.

    Returns:
        the cells that failed; their cell.json says why.

    Raises:
        UserError: a finished or begun cell was of another plan.
        Stopped: a signal asked for it; the runs have saved.
    """
    check_plans(cells)
    waiting = [cell for cell in cells if cell.status != DONE]
    free, running = list(places), []
    failed: list[Cell] = []

    def kill(_: int) -> None:
        for run in list(running):
            run.send(signal.SIGKILL)

    with stop_signals(on_first=lambda number: None, on_second=kill):
        try:
            while running or (waiting and not stop_requested()):
                while waiting and free and not stop_requested():
                    running.append(_Run(waiting.pop(0), free.pop(0)))
                if stop_requested():
                    for run in running:
                        run.ask_to_stop()
                time.sleep(_POLL_SECONDS)
                for run in list(running):
                    if not run.advance():
                        running.remove(run)
                        free.append(run.place)
                        if run.cell.result is not None:
                            ended(run.cell)
                        if run.error:
                            failed.append(run.cell)
                watch([run.cell for run in running])
            if stop_requested():
                raise Stopped(stop_requested())
        finally:
            for run in running:  # after an error of this process
                run.ask_to_stop()
                run.wait()
    return failed


@contextlib.contextmanager
def only_runner(root: Path) -> Iterator[None]:
    """The body is the only one of its kind in this folder.

    Raises:
        UserError: another process is running cells there.
    """
    root.mkdir(parents=True, exist_ok=True)
    lock = _lock(root)
    if lock is None:
        raise UserError(
            f"another command is running in {root}; wait for it, or name another folder"
        )
    try:
        yield
    finally:
        os.close(lock)


def check_plans(cells: Sequence[Cell]) -> None:
    """
    Raises:
        UserError: a finished or begun cell was of another plan.
    """
    changed = [(cell, change) for cell in cells if (change := cell.replanned()) is not None]
    if changed:
        cell, change = changed[0]
        others = f" ({len(changed) - 1} more like it)" if len(changed) > 1 else ""
        raise UserError(
            f"{cell.folder} was run with another plan: {change}{others}; remove such folders to "
            "run them again, restore the plan, or name another output folder"
        )


@dataclass
class _Run:
    """A cell that is running: its steps one after the other."""

    cell: Cell
    place: Mapping[str, str]
    error: str | None = None
    _begun: float = field(default_factory=time.monotonic)
    _seconds_before: float = 0.0
    _step: int = 0
    _lock: int | None = None
    _process: subprocess.Popen | None = None
    _log: Path | None = None
    _log_begin: int = 0
    _asked: bool = False
    _told: bool = False

    def advance(self) -> bool:
        """Look after the run; False when it has ended."""
        if self._process is None:
            return self._start_first()
        code = self._process.poll()
        if code is None:
            return True
        finished = self._step + (code == 0)
        self.cell.write_plan(finished, self._seconds_before + time.monotonic() - self._begun)
        if self._asked:  # unless it was at its end, it has saved and will go on
            return self._leave() if finished < len(self.cell.steps) else self._end(None)
        if code != 0:
            return self._end(_reason(code, self._log, self._log_begin))
        self._step = finished
        if finished < len(self.cell.steps):
            self._start()
            return True
        return self._end(None)

    def ask_to_stop(self) -> None:
        if not self._asked:
            self._asked = True
            self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait()

    def _start_first(self) -> bool:
        if self._asked:
            return self._leave()
        self.cell.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.cell.folder)
        if self._lock is None:
            if not self._told:
                print(f"{self.cell.name}: a run of an earlier start is still saving", flush=True)
            self._told = True
            return True
        error = _changed_file(self.cell.files)
        if error is not None:
            return self._end(error)
        self._begun, self._seconds_before = time.monotonic(), self.cell.seconds()
        self._step = self.cell.steps_done()
        if self._step == len(self.cell.steps):  # it was killed when all but cell.json was there
            return self._end(None)
        self.cell.write_plan(self._step, self._seconds_before)
        (self.cell.folder / "cell.json").unlink(missing_ok=True)
        self._start()
        return True

    def _start(self) -> None:
        step = self.cell.steps[self._step]
        self._log = self.cell.folder / f"{step.name}.out"
        with open(self._log, "ab") as log:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.place},
                pass_fds=[self._lock],  # held for as long as the run lives
                start_new_session=True,  # a terminal's Ctrl-C reaches this process alone
                preexec_fn=_die_with(os.getpid()),
            )

    def _end(self, error: str | None) -> bool:
        self.error = self.cell.write_result(error)["error"]
        return self._leave()

    def _leave(self) -> bool:
        if self._lock is not None:
            os.close(self._lock)
        return False


def _die_with(parent: int) -> Callable[[], None] | None:
    """What a new process does first, so that the end of `parent`, even by SIGKILL, asks it to
    stop. Elsewhere than on Linux, it goes on to its end, and its lock keeps others away."""
    if _libc is None:
        return None

    def ask() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has died already
            os._exit(1)

    return ask


def _lock(folder: Path) -> int | None:
    """A descriptor that locks a folder until it and its copies are closed; None: it is locked."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _changed_file(files: Mapping[str, str]) -> str | None:
    for path, expected in files.items():
        try:
            actual = sha256(path)
        except OSError as error:
            return f"{path} cannot be read any more: {error.strerror}"
        if actual != expected:
            return f"{path} is not the file any more that was checked: SHA-256 {actual[:12]}…"
    return None


def _reason(code: int, log: Path, begin: int) -> str:
    """Why a run failed, in a line."""
    if code < 0:
        name = signal.Signals(-code).name
        perhaps = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
        return f"killed by {name}{perhaps}; see {log}"
    with open(log, "rb") as f:
        f.seek(begin)
        text = _COLOUR.sub("", f.read().decode(errors="replace"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    last = (errors or lines or [f"exit code {code}"])[-1]
    said = _ERROR.match(last)
    kept = said[1] if said and said[1] and not said[0].split(":")[0].endswith("Error") else last
    return f"{kept}; see {log}"
