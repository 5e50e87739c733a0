"""Building blocks of the Hopper kernels: shared-memory forms, register layouts, small products.

Called by `gpu_decode` and `gpu_chunks`. Each takes a form that both Pallas' interpreter and the
compiler for sm_90a accept, so that one source is run in the one and compiled by the other.

Invariant: what one warpgroup stores in shared memory for wgmma or TMA to read goes through a
function here that ends in `commit_smem`; the interpreter's race detector does not see that mistake.
"""

import math

import jax.numpy as jnp

from pallas_kernels import compat

I32, F32, BF16 = jnp.int32, jnp.float32, jnp.bfloat16

PAGE = 64  # tokens a page: the least M of wgmma, and the only page size that is served
LOG2E = math.log2(math.e)  # scores are kept in units of log 2: exp2 is one instruction
MASKED = -1e30  # a masked score; finite, so that the difference of two is no NaN

ROWS = compat.GpuLayout.WGMMA  # f32 [M, N]: what wgmma leaves in registers
PER_COLUMN = ROWS.reduce(0)  # f32 [N], one value for each column of a product
BYTE_ROWS = compat.GpuLayout.WGMMA_8BIT  # 8-bit [M, N], which widens to ROWS with few exchanges

# Shared memory that wgmma reads: bf16 in tiles of 8 rows of 128 bytes, 8-bit ones of 64.
BF16_TILES = (compat.TilingTransform((8, 64)), compat.SwizzleTransform(128))
BYTE_TILES = (compat.TilingTransform((8, 64)), compat.SwizzleTransform(64))


def matmul(a, b):
    """a [M, K] @ b [K, N], both in shared memory -> f32 [M, N] in registers.

    A fresh accumulator each time: the interpreter cannot start one from a value, and adding in
    registers costs N / 2 of them.
    """

    def product(accumulator):
        compat.wgmma(accumulator, a, b)
        return accumulator[...]

    return compat.run_scoped(product, compat.WgmmaAccumulator((a.shape[0], b.shape[1]), F32))


def full(shape: tuple[int, ...], value: float, layout):
    """A constant f32 array in registers, in the layout that a loop carries it in."""
    return compat.layout_cast(jnp.full(shape, value, F32), layout)


def tanh(x):
    """tanh of f32 in registers, to about 1e-7.

    With `approx_math` jnp.tanh is the hardware's own, which is off by up to 2**-11: 0.02 in a score
    with a cap of 50. The interpreter, which computes tanh exactly, does not show it.
    """
    return 1 - 2 / (1 + jnp.exp2(x * F32(2 * LOG2E)))


def store(ref, value) -> None:
    """Put a value in shared memory, for wgmma or TMA to read."""
    ref[...] = value
    compat.commit_smem()
