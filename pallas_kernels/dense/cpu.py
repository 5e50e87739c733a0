"""Dense products of few rows on CPU in C++ (cpu.cc), through jax.ffi: float32, on XLA's own threads.

Called by the model's projections where attention runs in C++ too. Weights keep XLA's layout, so the same
arrays serve XLA's product for other numbers of rows. Invariant: a row of a result is the same, bit for bit,
beside any other rows.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.native import load

TARGET = "jaxserve_dense"
# Where it is faster than XLA's own product, which reads at memory speed with one row and computes as fast
# from some more on (docs/kernels.md has the figures).
ROWS = range(2, 9)


def dense(x: jax.Array, weights: Sequence[jax.Array]) -> list[jax.Array]:
    """x @ weight for each weight, as one list of work. Any number of rows will do; ROWS are those that pay.

    Args:
        x: f32[M, K].
        weights: f32[K, N] each, with an N of its own.

    Returns:
        f32[M, N] for each weight.

    Raises:
        NotImplementedError: there is no C++ kernel for this CPU.
    """
    load.register()
    shapes = [jax.ShapeDtypeStruct((x.shape[0], one.shape[1]), jnp.float32) for one in weights]
    return list(jax.ffi.ffi_call(TARGET, shapes)(x, *weights))
