"""Are page copies bit-exact on this device, and how fast? All of a pool's traffic goes through them."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pallas_kernels.ragged_paged_attention import KVPages
from pallas_kernels.ragged_paged_attention.arg_specs import HeadSpec
from scripts.device.report import Row
from scripts.device.timing import seconds_per_call

NUM_PAGES = 1025


def check_copies(
    backend: str, *, seed: int, dtype: str, page_size: int, heads: HeadSpec
) -> Iterator[Row]:
    """Copy, gather and scatter a fresh random quarter of a pool: exact, and GB/s read and written."""
    rng = np.random.default_rng(seed)
    shape = (NUM_PAGES, heads.num_kv_heads, 2, page_size, heads.head_dim)
    before = jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)
    every = jnp.arange(NUM_PAGES, dtype=jnp.int32)
    empty = KVPages.zeros(
        dispatch.layout_of(backend), NUM_PAGES, page_size, *shape[1:2], shape[4], dtype
    )
    kv = empty.scatter(every, before)
    ids = rng.permutation(NUM_PAGES - 1).astype(np.int32) + 1
    source, target = (jnp.asarray(part) for part in np.split(ids, 4)[:2])
    copy, gather, scatter = (
        jax.jit(functools.partial(f, backend=backend), donate_argnames=donated)
        for f, donated in ((copy_pages, "kv"), (gather_pages, ()), (scatter_pages, "kv"))
    )
    taken = gather(kv, source)
    yield _row("gather", taken, before[source], lambda: gather(kv, source), taken.nbytes)
    state = [copy(kv, source, target)]
    want = before.at[target].set(before[source])
    found = state[0].gather(every)

    def copy_again():
        state[0] = copy(state[0], source, target)
        return state[0].data

    yield _row("copy", found[1:], want[1:], copy_again, taken.nbytes)
    new = jnp.asarray(rng.standard_normal(taken.shape, np.float32)).astype(dtype)

    def scatter_again():
        state[0] = scatter(state[0], source, new)
        return state[0].data

    scatter_again()
    found = state[0].gather(every)
    yield _row("scatter", found[1:], want.at[source].set(new)[1:], scatter_again, taken.nbytes)


def _row(name: str, found, want, call, num_bytes: int) -> Row:
    exact = np.asarray(found).tobytes() == np.asarray(want).tobytes()
    rate = 2 * num_bytes / seconds_per_call(call, repetitions=10) / 1e9
    fault = "" if exact else "pages differ"
    return Row(part="copies", name=f"{name} pages", figures={"gb_per_s": rate}, fault=fault)
