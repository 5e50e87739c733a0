"""Ctrl-C and SIGTERM for `run` and `bench`: at once at first, between two steps when there is work to keep.

    entered ---- a signal ends the process at once: nothing has been written
    defer() ---- the first one is remembered, and the loop asks `requested` between steps;
                 a second one ends the process at once, with what is on disk
    left ------- signals are ignored: the exit code is decided

Invariant: no signal raises an exception. One that did would come up anywhere, in a callback inside jax
for example, where it is printed and lost. Signals are taken by a thread, so that they count while the
main thread compiles or waits for a pipe that nobody reads.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A second signal sooner than this may be the first one's echo (a terminal and a wrapper such as
# `timeout` both send one): it still ends the process, but not before this time is over.
_ECHO_S = 0.5
_STDERR = 2
_STDERR_WAIT_S = 0.2  # a line is not worth more: stderr may be a pipe that nobody reads
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar has hidden it


class StopSignals(AbstractContextManager["StopSignals"]):
    """Holds SIGINT and SIGTERM while it is entered (in the main thread; elsewhere it does nothing).

    Args:
        too_early: how the line about a stop before `defer` ends ("before anything was generated").
    """

    def __init__(self, too_early: str) -> None:
        self._too_early = too_early
        self._clean_up: Callable[[], None] | None = None
        self._received: signal.Signals | None = None
        self._received_at = 0.0
        self._deferred = False
        self._is_over = False
        self._between_phases = threading.Lock()
        self._writing: int | None = None  # end of the pipe that wakes the thread
        self._previous_wakeup = -1

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self._received is not None

    @property
    def name(self) -> str:
        """The signal's name, for the message."""
        return self._received.name if self._received else "nothing"

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells count; 130 for SIGINT."""
        return 128 + (self._received or signal.SIGINT)

    def clean_up_with(self, clean_up: Callable[[], None]) -> None:
        """What to do, in the thread that takes the signals, before the process ends in its first phase."""
        self._clean_up = clean_up

    def defer(self) -> None:
        """From here on the first signal is remembered instead of ending the process."""
        with self._between_phases:
            self._deferred = True

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        # A daemon: it must not keep the process alive.
        threading.Thread(target=self._watch, args=(reading,), daemon=True, name="signals").start()
        self._previous_wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for one in _SIGNALS:
            signal.signal(one, _only_wake)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._writing is None:
            return
        with self._between_phases:
            self._is_over = True
        # Ignored, not handled: the interpreter takes handlers away before its very end.
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._writing)  # the end of the thread
        self._writing = None

    def _watch(self, reading: int) -> None:
        while numbers := os.read(reading, 16):
            for number in numbers:
                if number in _SIGNALS:
                    self._take(signal.Signals(number))
        os.close(reading)

    def _take(self, received: signal.Signals) -> None:
        with self._between_phases:
            if self._is_over:
                return
            if not self._deferred:
                if self._clean_up:
                    self._clean_up()
                _end_process(received, self._too_early)
            if self._received is None:
                self._received, self._received_at = received, time.monotonic()
                return
        time.sleep(max(0.0, self._received_at + _ECHO_S - time.monotonic()))
        with self._between_phases:
            if not self._is_over:
                _end_process(received, "at once, by a second signal")


def _only_wake(signum: int, frame: FrameType | None) -> None:
    """The handler: there must be one for the signal's number to be written to the thread's pipe."""


def _end_process(received: signal.Signals, how: str) -> None:
    """Says why in one line, if that can be written, and ends the process without another step."""
    cursor = _SHOW_CURSOR if os.isatty(_STDERR) else ""
    with contextlib.suppress(OSError):
        if select.select([], [_STDERR], [], _STDERR_WAIT_S)[1]:
            os.write(_STDERR, f"{cursor}stopped by {received.name} {how}\n".encode())
    os._exit(128 + received)


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Puts the handlers of SIGINT and SIGTERM back at the end, for a caller that goes on after a command."""
    previous = {one: signal.getsignal(one) for one in _SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for one, handler in previous.items():
                if handler is not None:  # None: not installed by Python, which cannot put it back
                    signal.signal(one, handler)
