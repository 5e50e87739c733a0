"""The three page copies as one: lists of pages to take and of places to put them.

Called by `tpu` and `gpu`, whose kernels do dest[to_ids[i]] = origin[from_ids[i]] for each i with
from_ids[i] >= 0. Invariant: padding never writes to the pool, so no two entries write one page.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

SKIP = -1  # in from_ids: there is nothing to move


class Moves(NamedTuple):
    """Which pages move where."""

    from_ids: jax.Array  # i32[n] pages of the origin, or SKIP
    to_ids: jax.Array  # i32[n] pages of the destination


def within_pool(source: jax.Array, target: jax.Array) -> Moves:
    """Page source[i] of the pool to page target[i], both i32[n]; pairs (0, 0) are padding."""
    return Moves(jnp.where(source == target, jnp.int32(SKIP), source), target)


def out_of_pool(page_ids: jax.Array) -> Moves:
    """Page page_ids[i] of the pool, i32[n], to place i of a buffer."""
    return Moves(page_ids, _positions(page_ids))


def into_pool(page_ids: jax.Array) -> Moves:
    """Place i of a buffer to page page_ids[i] of the pool, i32[n]; entries 0 are padding."""
    return Moves(jnp.where(page_ids == 0, jnp.int32(SKIP), _positions(page_ids)), page_ids)


def _positions(ids: jax.Array) -> jax.Array:
    return jnp.arange(ids.shape[0], dtype=jnp.int32)
