"""`Turns`: one call at a time. Held by the engine, which nobody may enter twice.

Invariant: whoever is inside gives the lock back, whatever interrupts it.
"""

import threading


class Turns:
    """Nobody is inside at the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self, method: str) -> threading.Lock:
        """The lock that a call holds, for its `with`; refuses a call while another one is inside.

        A plain lock in a `with` of its own: no interrupt comes between taking it and being sure to
        give it back. (Two that pass the check at the same time come one after the other.)

        Args:
            method: of the engine, for the error.

        Raises:
            RuntimeError: another thread is inside.
        """
        if self._lock.locked():
            raise RuntimeError(
                f"Engine.{method} was called while another thread is inside the engine: "
                "drive an engine from one thread, or put a lock around it"
            )
        return self._lock
