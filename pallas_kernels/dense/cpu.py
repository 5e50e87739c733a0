"""A dense product on CPU in C++ (cpu.cc), through jax.ffi: float32, on XLA's own threads, any number of rows.

Called by the model's projections where attention runs in C++ too. The weight is packed once, when it is
put on the device, so that the kernel reads it as one run of memory. Invariant: a row of a result is the
same, bit for bit, beside any other rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import load

TARGET = "jaxserve_dense"
PANEL = 64  # columns of a panel


def packed_shape(size: int, columns: int) -> tuple[int, int, int]:
    """[P, K, 64] of a weight [K, N]."""
    return -(-columns // PANEL), size, PANEL


def pack(weights: Any) -> Any:
    """Weights side by side, as `dense` takes them: column 64 p + j of what they make together stands in
    [p, :, j]; columns behind the last are zeros.

    Args:
        weights: f32[K, N] each, with an N of its own; numpy, on a device, or abstract.

    Returns:
        f32[P, K, 64] of the same kind, always a copy.
    """
    first, columns = weights[0], sum(one.shape[1] for one in weights)
    shape = packed_shape(first.shape[0], columns)
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, first.dtype)
    packed = np.zeros(shape, first.dtype)
    column = 0
    for weight in map(np.asarray, weights):
        begin = 0
        while begin < weight.shape[1]:  # runs of whole panels, and pieces of panels
            panel, offset = divmod(column, PANEL)
            count = min(PANEL - offset, weight.shape[1] - begin)
            if offset == 0 and weight.shape[1] - begin >= PANEL:
                whole = (weight.shape[1] - begin) // PANEL
                count = whole * PANEL
                piece = weight[:, begin : begin + count].reshape(-1, whole, PANEL)
                packed[panel : panel + whole] = piece.transpose(1, 0, 2)
            else:
                packed[panel, :, offset : offset + count] = weight[:, begin : begin + count]
            begin, column = begin + count, column + count
    return packed


def dense(x: jax.Array, packed: jax.Array, columns: int) -> jax.Array:
    """x @ weight.

    Args:
        x: f32[M, K].
        packed: f32[P, K, 64], from `pack`.
        columns: N of the weight.

    Returns:
        f32[M, N].

    Raises:
        NotImplementedError: there is no C++ kernel for this CPU.
    """
    load.register()
    result = jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32)
    return jax.ffi.ffi_call(TARGET, result)(x, packed)
