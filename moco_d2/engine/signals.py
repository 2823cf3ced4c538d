"""Signals that ask a run to stop: the first lets it finish its step and save, a second does not."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# One request can arrive several times: a terminal, `timeout`, torchrun and schedulers signal a
# process and its whole group. What follows within so many seconds is not a second request.
_ECHO_SECONDS = 1.0

_END = b"\0"  # no signal has the number 0

_requested = 0
_saves = False


class Stopped(SystemExit):
    """The run has saved and ends because of a signal; the exit code is 128 + its number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


def stop_requested() -> int:
    """The number of the signal that asked this process to stop; 0: none did."""
    return _requested


@contextlib.contextmanager
def saved_on_signal() -> Iterator[None]:
    """The body is a run that looks at :func:`stop_requested` after each step, saves and ends.

    Outside, there is nothing to save, and the first signal ends the process at once.
    """
    global _saves
    _saves = True
    try:
        yield
    finally:
        _saves = False


@contextlib.contextmanager
def signals_kept_from_workers() -> Iterator[None]:
    """Processes that are forked in the body obey SIGTERM from this process alone.

    Schedulers send it to all processes of a job, and without its loader workers a run could not
    finish its step.
    """
    forked = multiprocessing.get_start_method() == "fork"  # others never get to obey
    can_wait = hasattr(signal, "sigwaitinfo")  # macOS has no such call
    blocked = [signal.SIGTERM] if forked and can_wait else []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def stop_signals(
    on_first: Callable[[int], None] | None = None,
    on_second: Callable[[int], None] = lambda number: None,
) -> Iterator[None]:
    """Catch SIGTERM, SIGINT and SIGUSR1 while the body runs, in the main thread of a process.

    A thread of its own reads them, so that a second one ends even a process whose main thread
    waits inside a library for others.

    Args:
        on_first: called with the number of the first signal, which then ends nothing.
        on_second: called with that of a second one, before the process exits with 128 + number.
    """
    global _requested
    _requested = 0
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handlers = {s: signal.signal(s, lambda *_: None) for s in STOP_SIGNALS}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(reader, on_first, on_second), daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.write(writer, _END)  # closing it does not: workers may have it, too
        listener.join()
        os.close(writer)
        os.close(reader)


def _listen(reader: int, on_first: Callable | None, on_second: Callable) -> None:
    global _requested
    first_at = 0.0
    while (byte := os.read(reader, 1)) != _END:
        number = byte[0]
        if number not in STOP_SIGNALS:
            continue
        name = signal.Signals(number).name
        if not _requested and (_saves or on_first is not None):
            _requested, first_at = number, time.monotonic()
            if on_first is not None:
                on_first(number)
            else:
                logger.info(f"{name}: finishing and saving this step; a second one ends at once")
        elif time.monotonic() - first_at > _ECHO_SECONDS:
            logger.warning(f"{name}: this process ends at once")
            on_second(number)
            os._exit(128 + number)


def _leave_signals_to_the_parent() -> None:
    # A loader's worker would else report what it gets as if it were the process it came from,
    # and die of the Ctrl-C that asks for a last step.
    if signal.set_wakeup_fd(-1) != -1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        threading.Thread(target=_obey_only, args=(os.getppid(),), daemon=True).start()


def _obey_only(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)


os.register_at_fork(after_in_child=_leave_signals_to_the_parent)
