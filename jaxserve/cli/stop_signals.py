"""Ctrl-C and SIGTERM for `run`: at once while it starts, between two steps once there is work to keep.

Invariant: after `defer()` no signal raises, however often it is sent; the loop asks `requested` between
steps.
"""

import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals(AbstractContextManager["StopSignals"]):
    """Holds SIGINT and SIGTERM while it is entered (in the main thread; elsewhere it does nothing)."""

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._deferred = False
        self._previous: dict[signal.Signals, object] = {}

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

    def defer(self) -> None:
        """From here on a signal is remembered instead of raising KeyboardInterrupt."""
        self._deferred = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(signum)
        if not self._deferred:
            self._deferred = True
            raise KeyboardInterrupt

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._previous = {one: signal.signal(one, self._handle) for one in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        if self.requested:
            return  # the process is about to end: one more Ctrl-C must not break in on that
        for one, handler in self._previous.items():
            signal.signal(one, handler)  # type: ignore[arg-type]
