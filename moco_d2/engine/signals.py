"""Signals that ask a run to stop: the first lets it finish its step and save, a second does not."""

import contextlib
import logging
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

_requested = 0


class Stopped(SystemExit):
    """The run has saved and ends because of a signal; the exit code is 128 + its number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


def stop_requested() -> int:
    """The number of the signal that asked this process to stop; 0: none did."""
    return _requested


@contextlib.contextmanager
def stop_signals(
    on_first: Callable[[int], None] = lambda number: None,
    on_second: Callable[[int], None] = lambda number: None,
) -> Iterator[None]:
    """Catch SIGTERM, SIGINT and SIGUSR1 while the body runs, in the main thread of a process.

    A thread of its own reads them, so that a second one ends even a process whose main thread
    waits inside a library for others.

    Args:
        on_first: called with the number of the first signal.
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
        os.close(writer)  # ends the thread
        listener.join()
        os.close(reader)


def _listen(reader: int, on_first: Callable, on_second: Callable) -> None:
    global _requested
    first_at = 0.0
    while byte := os.read(reader, 1):
        number = byte[0]
        if number not in STOP_SIGNALS:
            continue
        name = signal.Signals(number).name
        if not _requested:
            _requested, first_at = number, time.monotonic()
            logger.info(f"{name}: the step is finished and saved; a second signal ends at once")
            on_first(number)
        elif time.monotonic() - first_at > _ECHO_SECONDS:
            logger.warning(f"{name} again: this process ends at once, unsaved")
            on_second(number)
            os._exit(128 + number)


def _leave_signals_to_the_parent() -> None:
    # A loader's worker would else report what it gets as if it were the process it came from,
    # and die of the Ctrl-C that asks for a last step.
    if signal.set_wakeup_fd(-1) != -1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_signals_to_the_parent)
