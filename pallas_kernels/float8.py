"""8-bit floats as the bytes they are, for programs of XLA that only move them.

Called by the page layouts and by page copies. XLA for CPU works on 8-bit floats as 16-bit ones, even
to move them: that changes the payload of a NaN, and where one page is written the whole pool is
converted. Bytes it moves as they are.

Invariant: arrays of other types pass unchanged.
"""

import jax
import jax.numpy as jnp
from jax import lax


def is_float8(dtype) -> bool:
    """Whether it is an 8-bit float."""
    return jnp.dtype(dtype).itemsize == 1 and jnp.issubdtype(dtype, jnp.floating)


def as_bytes[Tree](tree: Tree) -> Tree:
    """A tree of arrays, those of 8-bit floats as uint8."""
    return jax.tree.map(
        lambda a: lax.bitcast_convert_type(a, jnp.uint8) if is_float8(a.dtype) else a, tree
    )


def as_type[Tree](tree: Tree, dtype) -> Tree:
    """What `as_bytes` made of a tree of arrays of `dtype`, in it again."""
    if not is_float8(dtype):
        return tree
    return jax.tree.map(lambda a: lax.bitcast_convert_type(a, dtype), tree)
