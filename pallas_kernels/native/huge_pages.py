"""Memory for weights that are read from end to end in every step: in huge pages where the operating system
has them, and aligned so that jax's CPU device uses it in place.

Called by whoever packs weights for the C++ products. With pages of 4 KiB a step over a few hundred megabytes
misses the TLB at every page; inside a virtual machine each miss costs several reads of memory, and reading
was two to five times slower than in pages of 2 MiB.

Source: madvise(2), MADV_HUGEPAGE.
"""

import contextlib
import math
import mmap

import numpy as np
from numpy.typing import DTypeLike

_ALIGNMENT = 64  # bytes; XLA uses a buffer of the host in place where it begins at a multiple
_HUGE_PAGE = 2 << 20  # bytes, of x86 and most of Arm
_CHUNK = 64 << 20  # bytes taken from the operating system at once: small arrays share huge pages


class Arena:
    """Hands out arrays side by side. The operating system has a chunk back when the last of its arrays is
    gone; the arena itself holds nothing but the chunk that it hands out from.
    """

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)
        self._used = 0

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """As `numpy.zeros`.

        Args:
            shape, dtype: of the array.

        Raises:
            MemoryError: the operating system gives no more.
        """
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = _chunk(max(num_bytes, _CHUNK)), 0
        array = self._chunk[self._used : self._used + num_bytes].view(dtype).reshape(shape)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return array


def _chunk(num_bytes: int) -> np.ndarray:
    """u8 of zeros that begin at a huge page."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return _aligned(np.zeros(num_bytes + _ALIGNMENT, np.uint8), _ALIGNMENT, num_bytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=flags)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes for weights: {error.strerror}") from None
    with contextlib.suppress(OSError):  # a kernel without them: pages of its usual size
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(np.frombuffer(memory, np.uint8), _HUGE_PAGE, num_bytes)


def _aligned(memory: np.ndarray, alignment: int, num_bytes: int) -> np.ndarray:
    begin = -memory.ctypes.data % alignment
    return memory[begin : begin + num_bytes]
