"""What this machine can do at best: bytes streamed from memory and matrix products, a second.

Measured in the same run as whatever is held against it, because both change with what else the machine
does. Used by `jaxserve bench` and `scripts/bench_peers`. Invariant: both go through XLA and its threads,
as the engine does, and the array that is streamed is far larger than a cache.
"""

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.native.huge_pages import Arena

STREAM_BYTES = 256 << 20
GEMM_SIZE = 2048
NUM_REPETITIONS = 7
_COLUMNS = 2048  # of the matrix that is streamed
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What nothing on this machine can beat; medians over a few repetitions.

    Args:
        stream_bytes_per_s: reading a large array once.
        gemm_flops_per_s: a square matrix product; a multiply-add is two operations.
    """

    stream_bytes_per_s: float
    gemm_flops_per_s: float

    def least_s(self, num_bytes: float, num_flops: float) -> float:
        """Seconds that this traffic or this arithmetic takes at the least, whichever is more."""
        return max(num_bytes / self.stream_bytes_per_s, num_flops / self.gemm_flops_per_s)


def measure_ceilings(
    *,
    stream_bytes: int = STREAM_BYTES,
    gemm_size: int = GEMM_SIZE,
    dtype: str = "float32",
    repetitions: int = NUM_REPETITIONS,
) -> Ceilings:
    """Measures them, in about a second on two cores.

    Args:
        stream_bytes: of the array that is read.
        gemm_size: rows and columns of the matrices.
        dtype: of the matrix product.
        repetitions: of each.
    """
    streamed = Arena().zeros((max(stream_bytes // 4 // _COLUMNS, 1), _COLUMNS), jnp.float32)
    streamed += 1  # in huge pages, as packed weights are: elsewhere memory is slower to read
    x = jax.device_put(streamed)
    ones = jnp.ones(_COLUMNS, jnp.float32)
    # Which of them reads faster depends on the platform: the better one is what can be reached.
    streams = [
        _median_s(jax.jit(lambda x, ones: x @ ones), (x, ones), repetitions),
        _median_s(jax.jit(lambda x, _: x.sum()), (x, ones), repetitions),
    ]
    stream_bytes_per_s = x.nbytes / min(streams)
    _LOG.info("memory: %.1f GB/s read", stream_bytes_per_s / 1e9)
    a, b = (jnp.ones((gemm_size, gemm_size), dtype) for _ in range(2))
    gemm_s = _median_s(jax.jit(jnp.matmul), (a, b), repetitions)
    gemm_flops_per_s = 2 * gemm_size**3 / gemm_s
    _LOG.info("matrix product, %s: %.1f GFLOP/s", dtype, gemm_flops_per_s / 1e9)
    return Ceilings(stream_bytes_per_s=stream_bytes_per_s, gemm_flops_per_s=gemm_flops_per_s)


def _median_s(
    function: Callable[..., jax.Array], arguments: tuple[jax.Array, ...], repetitions: int
) -> float:
    function(*arguments).block_until_ready()
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        function(*arguments).block_until_ready()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
