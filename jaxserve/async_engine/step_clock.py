"""`StepClock`: how long an engine's loop has been busy with one step, seen from outside.

Written by the loop, read by whoever watches it, in another thread or through shared memory in another
process: so a loop that hangs, even inside a library that holds the interpreter lock, is seen.
"""

import mmap
import struct
import time

NUM_BYTES = 8
_PACK = struct.Struct("d")


class StepClock:
    """One number in memory: since when the loop is busy; 0 = it waits for work.

    Args:
        memory: at least NUM_BYTES, shared by both sides; None = of its own.
    """

    def __init__(self, memory: bytearray | mmap.mmap | None = None):
        self._memory = bytearray(NUM_BYTES) if memory is None else memory

    def begin(self) -> None:
        """The loop begins a round: commands and a step."""
        _PACK.pack_into(self._memory, 0, time.monotonic())

    def end(self) -> None:
        """The loop waits, or has ended."""
        _PACK.pack_into(self._memory, 0, 0.0)

    def busy_s(self) -> float:
        """Seconds since the present round began; 0.0 while the loop waits."""
        began_s = _PACK.unpack_from(self._memory, 0)[0]
        return max(0.0, time.monotonic() - began_s) if began_s else 0.0
