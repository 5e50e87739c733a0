"""The tied head on CPU in C++ (cpu.cc), through jax.ffi: float32, on XLA's own threads.

Called by the model's head where attention runs in C++ too. XLA's own product (2 CPU cores, 49152 x 576,
five alternating rounds) takes 1.4 times as long for one row and for sixteen, 1.2 times for 32, and is
a little faster between four and eight.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.native import load

TARGET = "jaxserve_tied_head"


def tied_head(x: jax.Array, embedding: jax.Array) -> jax.Array:
    """Logits of hidden rows; a row's are the same, bit for bit, in any batch.

    Args:
        x: f32[M, E].
        embedding: f32[V, E].

    Returns:
        f32[M, V].

    Raises:
        NotImplementedError: there is no C++ kernel for this CPU.
    """
    load.register()
    result = jax.ShapeDtypeStruct((x.shape[0], embedding.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(TARGET, result)(x, embedding)
