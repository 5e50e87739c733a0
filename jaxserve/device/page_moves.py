"""The page operations of an executor: copies within the pool (copy-on-write), pages to host RAM and
back (swapping).

Used by `DeviceExecutor` alone, before each step that asks for any. Its programs stand in the same table
as those of a step and work on a run of layers at a time, as `layers` does:

    copy_pages     (n)   n pairs of pages within the pools of a run
    gather_pages   (n)   n pages of a run, out of its pools   -> [n, layers, K, 2, page, D]
    scatter_pages  (n)   the same, back into its pools

Lists of any length are cut into pieces of a compiled n; what is left over is padded with page 0, the
null page.

Invariant: pools are donated to every program that writes them, so nothing as large as a pool is ever
made; what arrives is bit for bit what left, whatever the element type.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.device.host_storage import MAX_UNDER_WAY, HostStorage
from jaxserve.device.placement import WHOLE
from jaxserve.device.programs import Program, ProgramTable
from jaxserve.device.step_shapes import StepShapes
from jaxserve.model.sharding import on_own_heads
from jaxserve.schedule.batch import DeviceBatch
from pallas_kernels.float8 import as_bytes, as_type, is_float8
from pallas_kernels.page_copy import check_copies, copy_pages, gather_pages, scatter_pages
from pallas_kernels.ragged_paged_attention.layout import KVPages

# Measured on CPU with three layers of 64 tokens x 3 heads x 64 in float32: a call takes some 0.1 ms,
# and from 8 pages on every page takes the same 0.03 ms. A copy-on-write is mostly one page.
COPY_SIZES = (1, 8)
MOVE_SIZES = (8,)
NUM_TIMED = 3  # moves that are timed, after the first; each is a few ms, so the quickest counts


class PageMoves:
    """Moves pages as batches ask.

    Args:
        shapes: of the engine.
        programs: the executor's table; `list_programs` must be in it before anything is moved.
        num_host_pages: pages in host RAM; 0 = nothing ever leaves the device.
    """

    def __init__(self, shapes: StepShapes, programs: ProgramTable, *, num_host_pages: int):
        self._shapes = shapes
        self._programs = programs
        element = jnp.dtype(jnp.uint8) if is_float8(shapes.kv_dtype) else shapes.kv_dtype
        num_layers, num_kv_heads, *page = shapes.page_shape
        own = shapes.placement.own_kv_heads(num_kv_heads)
        self.storage = HostStorage(
            num_host_pages, (num_layers, own, *page), element, take=shapes.placement.take_pages
        )

    def list_programs(self) -> list[Program]:
        """What must be compiled."""
        shapes, cut, moved = (
            self._shapes,
            self._shapes.pages_spec,
            self._shapes.placement.moved_pages,
        )
        pages = shapes.abstract_pages()[shapes.runs[0]]
        copy = self._on_own_heads(_copy, in_specs=(cut, WHOLE), out_specs=cut)
        gather = self._on_own_heads(_gather, in_specs=(cut, WHOLE), out_specs=moved)
        scatter = self._on_own_heads(_scatter, in_specs=(cut, WHOLE, moved), out_specs=cut)
        found = [
            shapes.program(("copy_pages", n), copy, (pages, _pairs(n)), donated=(0,), results=cut)
            for n in COPY_SIZES
        ]
        for n in MOVE_SIZES if self.storage.num_pages else ():
            ids = jax.ShapeDtypeStruct((n,), jnp.int32)
            taken = shapes.placement.abstract(jax.eval_shape(_gather, pages, ids), moved)
            found += [
                shapes.program(("gather_pages", n), gather, (pages, ids), results=moved),
                shapes.program(
                    ("scatter_pages", n), scatter, (pages, ids, taken), donated=(0,), results=cut
                ),
            ]
        return found

    def _on_own_heads(self, function: Callable[..., Any], **specs: Any) -> Callable[..., Any]:
        """Several devices move their own heads each; kernels know of no other."""
        placement = self._shapes.placement
        if placement.kernel_mesh is None:
            return function
        return on_own_heads(function, placement.kernel_mesh, placement.rules.heads, **specs)

    def start(self, batch: DeviceBatch, kv_pages: list[KVPages]) -> None:
        """Moves pages out, copies, moves pages in, in this order; `kv_pages` is updated in place.

        Args:
            batch: names the pages.
            kv_pages: the pools of every layer.

        Raises:
            ValueError: moves between device and host where there are no host pages; nothing was
                moved.
        """
        runs = self._shapes.runs
        if not self.storage.num_pages and (batch.moves_out.size or batch.moves_in.size):
            raise ValueError(
                "a batch moves pages to or from the host, which has none: host_kv_gib=0"
            )
        for count, (page_ids, host_ids) in _pieces(batch.moves_out, MOVE_SIZES):
            self._move_out(count, page_ids, host_ids, kv_pages, runs)
        for _, pairs in _pieces(batch.copies, COPY_SIZES):
            copy = self._programs["copy_pages", pairs.shape[1]]
            for run in runs:
                kv_pages[run] = copy(kv_pages[run], pairs)
        for i, (_, (host_ids, page_ids)) in enumerate(_pieces(batch.moves_in, MOVE_SIZES)):
            if i:  # pages on their way to the pool take memory of the device: bound it
                jax.block_until_ready([kv_pages[run] for run in runs])
            self._move_in(host_ids, page_ids, kv_pages, runs)

    def check(self, batch: DeviceBatch) -> None:
        """Debug mode: refuse moves that `start` would trust.

        Raises:
            ValueError: the field and the pair at fault.
        """
        num_pages, num_host_pages = self._shapes.num_pages, self.storage.num_pages
        for name in ("moves_out", "copies", "moves_in"):
            pairs = getattr(batch, name)
            if pairs.dtype != np.int32 or pairs.ndim != 2 or len(pairs) != 2:
                raise ValueError(f"{name}: {pairs.dtype}{list(pairs.shape)}, expected int32[2, n]")
        check_copies(batch.copies[0], batch.copies[1], num_pages)
        page_ids, host_ids = batch.moves_out
        _check_ids("moves_out", "page", page_ids, 1, num_pages)
        _check_ids("moves_out", "host page", host_ids, 0, num_host_pages)
        _check_distinct("moves_out", "host page", host_ids)
        host_ids, page_ids = batch.moves_in
        _check_ids("moves_in", "host page", host_ids, 0, num_host_pages)
        _check_ids("moves_in", "page", page_ids, 1, num_pages)
        _check_distinct("moves_in", "page", page_ids)
        both = np.intersect1d(host_ids, batch.moves_out[1])
        if both.size:
            raise ValueError(f"moves_in: host page {both[0]} is moved out in the same step")

    def warm_up(self, kv_pages: list[KVPages]) -> float:
        """Runs every program once on padding, and times moves.

        Only the first run of layers is moved: the others use the same programs and take as long.

        Returns:
            Seconds to move one page of every layer one way, the mean of out and in, with what the
            host copies; infinite where there are no host pages: no move is ever worth it.
        """
        runs = self._shapes.runs
        for n in COPY_SIZES:
            kv_pages[runs[0]] = self._programs["copy_pages", n](
                kv_pages[runs[0]], np.zeros((2, n), np.int32)
            )
        if not self.storage.num_pages:
            return float("inf")
        # Pages that nobody has yet, back to where they came from.
        count = min(MOVE_SIZES[-1], self._shapes.num_pages - 1, self.storage.num_pages)
        host_ids = _padded(np.arange(count, dtype=np.int32), MOVE_SIZES[-1])
        page_ids = _padded(np.arange(1, count + 1, dtype=np.int32), MOVE_SIZES[-1])
        spent = []
        for _ in range(1 + NUM_TIMED):
            jax.block_until_ready(kv_pages[runs[0]])
            begin = time.perf_counter()
            self._move_out(count, page_ids, host_ids, kv_pages, runs[:1])
            self.storage.settle()
            self._move_in(host_ids, page_ids, kv_pages, runs[:1])
            jax.block_until_ready(kv_pages[runs[0]])
            spent.append(time.perf_counter() - begin)
        return min(spent[1:]) * len(runs) / (2 * count)

    def _move_out(
        self,
        count: int,
        page_ids: np.ndarray,
        host_ids: np.ndarray,
        kv_pages: list[KVPages],
        runs: Sequence[slice],
    ) -> None:
        """Ids are padded; the first `count` are not padding."""
        gather = self._programs["gather_pages", len(page_ids)]
        parts = [gather(kv_pages[run], page_ids) for run in runs]
        self.storage.receive(host_ids[:count], runs, parts)

    def _move_in(
        self,
        host_ids: np.ndarray,
        page_ids: np.ndarray,
        kv_pages: list[KVPages],
        runs: Sequence[slice],
    ) -> None:
        """Ids are padded: whatever host page 0 holds goes to the null page."""
        scatter = self._programs["scatter_pages", len(page_ids)]
        for run in runs:
            pages = self._shapes.placement.put_pages(self.storage.read(host_ids, run))
            kv_pages[run] = scatter(kv_pages[run], page_ids, pages)


def device_bytes(shapes: StepShapes) -> int:
    """Memory of each device that pages on their way take at most, where there are host pages."""
    one_page = math.prod(shapes.page_shape) * jnp.dtype(shapes.kv_dtype).itemsize
    one_page //= shapes.placement.shares.heads
    # On their way out, and one piece that `receive` has just been given; one on its way in, twice.
    return (MAX_UNDER_WAY + 3) * MOVE_SIZES[-1] * one_page


def _copy(kv_pages: Sequence[KVPages], pairs: jax.Array) -> list[KVPages]:
    """Pages pairs[0] over pages pairs[1] in each pool."""
    return [copy_pages(kv, pairs[0], pairs[1]) for kv in kv_pages]


def _gather(kv_pages: Sequence[KVPages], page_ids: jax.Array) -> jax.Array:
    """[n, layers, K, 2, page, D]; 8-bit floats as bytes, for XLA changes some where it stacks them."""
    return jnp.stack([as_bytes(gather_pages(kv, page_ids)) for kv in kv_pages], axis=1)


def _scatter(kv_pages: Sequence[KVPages], page_ids: jax.Array, pages: jax.Array) -> list[KVPages]:
    """Undoes `_gather`."""
    return [
        scatter_pages(kv, page_ids, as_type(pages[:, i], kv.dtype)) for i, kv in enumerate(kv_pages)
    ]


def _pieces(pairs: np.ndarray, sizes: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Cuts pairs i32[2, m] into (how many count, i32[2, n]) with n of `sizes`, ascending, padded with 0:
    the largest while it is full, the smallest that holds the rest.
    """
    begin, total = 0, pairs.shape[1]
    while begin < total:
        n = next((size for size in sizes if total - begin <= size), sizes[-1])
        piece = pairs[:, begin : begin + n]
        yield piece.shape[1], np.stack([_padded(ids, n) for ids in piece])
        begin += n


def _padded(ids: np.ndarray, n: int) -> np.ndarray:
    padded = np.zeros(n, np.int32)
    padded[: len(ids)] = ids
    return padded


def _pairs(n: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2, n), jnp.int32)


def _check_ids(name: str, what: str, ids: np.ndarray, low: int, high: int) -> None:
    for i in np.flatnonzero((ids < low) | (ids >= high))[:1]:
        raise ValueError(f"{name}[{i}]: {what} {ids[i]} is not in [{low}, {high})")


def _check_distinct(name: str, what: str, ids: np.ndarray) -> None:
    found, counts = np.unique(ids, return_counts=True)
    for twice in found[counts > 1][:1]:
        raise ValueError(f"{name}: {what} {twice} is written twice")
