"""Page copies for Hopper: one Mosaic GPU kernel call that moves pages through shared memory.

Called by `api`, which has checked the arguments; `moves` says what the kernel does. A page is
contiguous, so it is cut into pieces, which bulk copies take to shared memory and from there to their
place; no thread touches an element.

    block (move i, group g of the page's pieces)    load all pieces at once; store each as it lands

Blocks are small and independent: several share a multiprocessor, and their loads overlap.

Compiled to Hopper machine code and run in Pallas' interpreter; it has not run on hardware, and the
sizes are reasoned, not tuned.

Invariant: the pool is written through a mutable reference, so it is updated in place when donated.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.page_copy.moves import Moves, into_pool, out_of_pool, within_pool

LAYOUTS = ("head_major",)
PIECE_BYTES = 16 * 1024
MAX_PIECES = 4  # of a block, in flight together: 64 KiB, so three blocks fit a multiprocessor
BULK_COPY_BYTES = 16  # a bulk copy takes multiples of it, so aligned


def copy(kv, source, target, *, interpret):
    """See `api.copy_pages`."""
    return _write(kv, None, within_pool(source, target), interpret)


def gather(kv, page_ids, *, interpret):
    """See `api.gather_pages`."""
    interpret = compat.interpreter(interpret, compat.GpuInterpretParams)
    return _call(kv.data[0], None, out_of_pool(page_ids), interpret=interpret)


def scatter(kv, page_ids, pages, *, interpret):
    """See `api.scatter_pages`."""
    return _write(kv, pages, into_pool(page_ids), interpret)


def piece_elements(page_elements: int, item_bytes: int) -> int:
    """Elements of a piece: the page halved until a piece has at most PIECE_BYTES.

    Args:
        page_elements: 2 * K * page * D.
        item_bytes: bytes of an element.

    Raises:
        NotImplementedError: pages that cannot be halved into multiples of BULK_COPY_BYTES.
    """
    piece = page_elements
    while piece * item_bytes > PIECE_BYTES and piece % 2 == 0:
        piece //= 2
    if piece * item_bytes > PIECE_BYTES or piece * item_bytes % BULK_COPY_BYTES:
        raise NotImplementedError(
            f"pages of {page_elements * item_bytes} bytes: page copies of backend 'gpu' halve a page "
            f"into pieces of at most {PIECE_BYTES} bytes, multiples of {BULK_COPY_BYTES}"
        )
    return piece


def _write(kv, origin, moves, interpret):
    interpret = compat.interpreter(interpret, compat.GpuInterpretParams)
    pool = _call(origin, kv.data[0], moves, interpret=interpret)
    return dataclasses.replace(kv, data=(pool,))


# A jit of its own: an unrolled model traces and lowers it once, not once per layer.
@functools.partial(jax.jit, static_argnames="interpret")
def _call(origin, dest, moves: Moves, *, interpret):
    """`dest` with pages of `origin` moved in, both [.., K, 2, page, D].

    `origin` None is `dest`; `dest` None is n fresh pages.
    """
    pool = origin if dest is None else dest
    page_shape, count = pool.shape[1:], moves.to_ids.shape[0]
    size = piece_elements(math.prod(page_shape), pool.dtype.itemsize)

    def cut(pages):
        return pages.reshape(pages.shape[0], -1, size)

    if dest is None:
        out = jax.ShapeDtypeStruct((count, *cut(origin).shape[1:]), origin.dtype)
        moved = _run(out, out, moves, cut(origin), interpret=interpret)
        return moved.reshape(count, *page_shape)
    ref = jax.new_ref(cut(dest))
    inputs = (ref,) if origin is None else (cut(origin), ref)
    _run(ref, (), moves, *inputs, interpret=interpret)
    return jax.freeze(ref).reshape(dest.shape)


def _run(like, out_type, moves: Moves, *arrays, interpret):
    """Run the kernel over arrays cut into pieces like `like` [.., pieces, elements]."""
    num_pieces, size = like.shape[1:]
    block_pieces = min(MAX_PIECES, num_pieces)  # both are powers of two
    groups = num_pieces // block_pieces
    call = compat.gpu_kernel(
        functools.partial(_kernel, groups=groups),
        out_type=out_type,
        grid=(moves.to_ids.shape[0] * groups,),
        grid_names=("block",),
        scratch_types={
            "buffer": compat.SMEM((block_pieces, size), like.dtype),
            "landed": compat.Barrier(num_barriers=block_pieces),
        },
        interpret=interpret,
    )
    return call(*moves, *arrays)


def _kernel(from_ids, to_ids, *arrays, buffer, landed, groups: int):
    """`arrays`: origin and destination, or the pool that is both."""
    block = lax.axis_index("block")
    i, group = lax.div(block, jnp.int32(groups)), lax.rem(block, jnp.int32(groups))
    pieces = buffer.shape[0]
    origin, dest = arrays[0], arrays[-1]
    from_id, to_id = from_ids[i], to_ids[i]

    @compat.when(from_id >= 0)
    def _():
        for j in range(pieces):
            piece = origin.at[from_id, group * pieces + j]
            # Not the default mode, zeros: that asks for a tiled copy, of at most 256 elements an axis.
            mode = compat.OOBFillMode.UNDEFINED
            compat.copy_gmem_to_smem(piece, buffer.at[j], landed.at[j], oob_mode=mode)
        for j in range(pieces):
            compat.barrier_wait(landed.at[j])
            compat.copy_smem_to_gmem(buffer.at[j], dest.at[to_id, group * pieces + j])
        compat.wait_smem_to_gmem(0)
