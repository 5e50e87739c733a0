"""Page copies in plain XLA: every layout, every platform.

Called by `api`, which has checked the arguments. Compiled for CPU, v5e, v5p, v6e and Hopper: a
donated pool is updated in place and nothing as large as it is copied, but for 8-bit floats on CPU.
There they must move as bytes (see `float8`): layout "split" holds them so, and of another layout XLA
copies the whole pool to bytes and back.

Invariant: nothing here does arithmetic on elements.
"""

import jax
from jax import lax

from pallas_kernels.float8 import as_bytes, as_type, is_float8
from pallas_kernels.ragged_paged_attention.layout import LAYOUTS as PAGE_LAYOUTS

LAYOUTS = tuple(PAGE_LAYOUTS)


def copy(kv, source, target, *, interpret):
    """See `api.copy_pages`."""
    _refuse_interpret(interpret)
    return _copy(kv, source, target)


def gather(kv, page_ids, *, interpret):
    """See `api.gather_pages`."""
    _refuse_interpret(interpret)
    return _gather(kv, page_ids)


def scatter(kv, page_ids, pages, *, interpret):
    """See `api.scatter_pages`."""
    _refuse_interpret(interpret)
    return _scatter(kv, page_ids, pages)


# Jits of their own: an unrolled model traces and lowers them once, not once per layer.
@jax.jit
def _copy(kv, source, target):
    def copied(kv, source, target):
        def move(pool):
            pages = pool.at[source].get(mode="promise_in_bounds")
            return pool.at[target].set(pages, mode="promise_in_bounds")

        return jax.tree.map(move, kv)

    return _exactly(copied, kv, source, target)


@jax.jit
def _gather(kv, page_ids):
    return _exactly(lambda kv, page_ids: kv.gather(page_ids), kv, page_ids)


@jax.jit
def _scatter(kv, page_ids, pages):
    return _exactly(lambda kv, *pages: kv.scatter(*pages), kv, page_ids, pages)


def _exactly(function, kv, *arrays):
    """function(kv, *arrays), which moves elements of kv's dtype; on CPU as bytes if need be."""
    if not is_float8(kv.data[0].dtype):
        return function(kv, *arrays)

    def by_bytes(*trees):
        return as_type(function(*as_bytes(trees)), kv.dtype)

    return lax.platform_dependent(kv, *arrays, cpu=by_bytes, default=function)


def _refuse_interpret(interpret) -> None:
    if interpret is not None:
        raise NotImplementedError(
            f"interpret={interpret!r}: page copies of backend 'xla' have no kernel to interpret"
        )
