"""Page copies for TPU: one Mosaic kernel call that starts a DMA from HBM to HBM for each page.

Called by `api`, which has checked the arguments; `moves` says what the kernel does. Pages move as the
pool holds them; XLA turns what was gathered into the canonical format, and back.

Compiled for v5e, v5p and v6e and run in Pallas' interpreter; it has not run on hardware.

Invariant: at most MAX_IN_FLIGHT copies are under way, and all have landed when the kernel ends.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.float8 import as_bytes, as_type
from pallas_kernels.page_copy.moves import Moves, into_pool, out_of_pool, within_pool
from pallas_kernels.ragged_paged_attention import layout
from pallas_kernels.tpu_smem import SMEM_LIMIT_BYTES

LAYOUTS = ("tpu",)
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
# Reasoned, not tuned: enough to hide the start of a DMA of some 100 KiB.
MAX_IN_FLIGHT = 8


def copy(kv, source, target, *, interpret):
    """See `api.copy_pages`."""
    pool = _move(None, kv.data[0], within_pool(source, target), interpret)
    return dataclasses.replace(kv, data=(pool,))


def gather(kv, page_ids, *, interpret):
    """See `api.gather_pages`."""
    pages = _move(kv.data[0], None, out_of_pool(page_ids), interpret)
    to_canonical = layout.LAYOUTS["tpu"].to_canonical
    canonical = to_canonical((as_bytes(pages),), kv.num_kv_heads, kv.head_dim)
    return as_type(canonical, kv.dtype)


def scatter(kv, page_ids, pages, *, interpret):
    """See `api.scatter_pages`."""
    (pages,) = layout.LAYOUTS["tpu"].from_canonical(as_bytes(pages))
    pool = _move(as_type(pages, kv.dtype), kv.data[0], into_pool(page_ids), interpret)
    return dataclasses.replace(kv, data=(pool,))


def smem_bytes(num_ids: int) -> int:
    """SMEM that a call takes: two lists of ids."""
    return 2 * 4 * num_ids


def _move(origin, dest, moves: Moves, interpret):
    """`dest` with pages of `origin` moved in, both [.., page, words, pack, 128].

    Args:
        origin: pages to read, or None for those of `dest`.
        dest: pages to overwrite, in place, or None for n fresh ones.
        moves: which go where.
        interpret: as `api.copy_pages`.
    """
    count = moves.to_ids.shape[0]
    dtype = (origin if dest is None else dest).dtype.name
    if dtype not in DTYPES:
        raise NotImplementedError(
            f"kv dtype {dtype}: page copies of backend 'tpu' serve {', '.join(DTYPES)}"
        )
    if smem_bytes(count) > SMEM_LIMIT_BYTES:
        raise ValueError(
            f"{count} pages: their ids take {smem_bytes(count)} bytes of SMEM, page copies of "
            f"backend 'tpu' have {SMEM_LIMIT_BYTES}; move them in parts"
        )
    interpret = compat.interpreter(interpret, compat.TpuInterpretParams)
    return _call(origin, dest, moves, interpret=interpret)


# A jit of its own: an unrolled model traces and lowers it once, not once per layer.
@functools.partial(jax.jit, static_argnames="interpret")
def _call(origin, dest, moves, *, interpret):
    shape = (moves.to_ids.shape[0], *origin.shape[1:]) if dest is None else dest.shape
    inputs = [array for array in (origin, dest) if array is not None]
    hbm = compat.BlockSpec(memory_space=compat.ANY)
    call = compat.pallas_call(
        functools.partial(_kernel, within=origin is None),
        name="move_pages",
        grid_spec=compat.TpuGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[hbm] * len(inputs),
            out_specs=hbm,
            scratch_shapes=[compat.DmaSemaphore((MAX_IN_FLIGHT,))],
        ),
        out_shape=jax.ShapeDtypeStruct(shape, inputs[0].dtype),
        input_output_aliases={} if dest is None else {1 + len(inputs): 0},
        interpret=interpret,
    )
    return call(*moves, *inputs)


def _kernel(from_ids, to_ids, *refs, within: bool):
    """`refs`: the inputs, the output, the semaphores; `within`: the output is the origin too."""
    dest, semaphores = refs[-2:]
    copies = _Copies(from_ids, to_ids, dest if within else refs[0], dest, semaphores)

    def step(i, _):
        copies.wait(i - MAX_IN_FLIGHT)  # the one that had the semaphore of i
        copies.start(i)

    lax.fori_loop(0, from_ids.shape[0] + MAX_IN_FLIGHT, step, None)


class _Copies:
    """The copies by their number; one that does not exist is neither started nor waited for."""

    def __init__(self, from_ids, to_ids, origin, dest, semaphores):
        self.from_ids, self.to_ids = from_ids, to_ids
        self.origin, self.dest, self.semaphores = origin, dest, semaphores

    def start(self, i):
        self._if_any(i, lambda: self._copy(i).start())

    def wait(self, i):
        self._if_any(i, lambda: self._copy(i).wait())

    def _copy(self, i):
        semaphore = self.semaphores.at[lax.rem(i, jnp.int32(MAX_IN_FLIGHT))]
        page = self.origin.at[self.from_ids[i]]
        return compat.make_async_copy(page, self.dest.at[self.to_ids[i]], semaphore)

    def _if_any(self, i, act):
        @compat.when((i >= 0) & (i < self.from_ids.shape[0]))
        def _():
            compat.when(self.from_ids[i] >= 0)(act)
