"""Zeros on the CPU that take no memory until they are touched (lazy_zeros.cc), through jax.ffi.

Called by the device layer for pools of KV pages. XLA's own zeros write every byte: two GiB of pool take
a second and then lie in memory, whatever of it is used.
"""

import jax

from pallas_kernels.native import load

TARGET = "jaxserve_lazy_zeros"


def lazy_zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """An array of zeros, inside a program for the CPU.

    Args:
        shape, dtype: as of `jax.numpy.zeros`.

    Raises:
        NotImplementedError: the C++ kernels were not built for this CPU.
    """
    load.register()
    # With a side effect, so that XLA never makes one buffer of two that look alike.
    return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(shape, dtype), has_side_effect=True)()
