"""The entry to page copies: checks the arguments, resolves the backend, calls it.

Called by the device layer, inside jit, once for each layer: copy-on-write of shared pages, and pages
that leave for a tier or come back. Invariant: what arrives is bit for bit what was there, whatever
the element type (NaN payloads too), and no page is written that the caller did not name.

Page 0 is the null page: it stands for padding in every list of ids, and what it holds is nobody's.
So a backend may write anything to it, or leave it alone.
"""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention.layout import KVPages


def copy_pages(
    kv: KVPages,
    source: jax.Array,
    target: jax.Array,
    *,
    backend: str = "auto",
    interpret: object = None,
) -> KVPages:
    """Overwrite page target[i] with page source[i], for every i, in one layer's pool.

    Pairs (0, 0) are padding. In all others targets are distinct, no target is a source and neither
    is page 0: copies run in any order, many at once. Ids are traced and therefore trusted;
    `check_copies` checks them on the host.

    Args:
        kv: one layer's pages. Donate it to have it updated in place.
        source: i32[n], pages to read. n may be 0.
        target: i32[n], pages to overwrite.
        backend: a name in `dispatch.BACKENDS`, the one that the pool was made for, or "auto": the
            platform's kernel where it reads this pool, else XLA.
        interpret: only for Pallas backends: True or the interpreter's own parameters run the kernel
            on the CPU, slowly; None runs it on the device.

    Returns:
        The pool with those pages replaced.

    Raises:
        ValueError: an argument whose shape or dtype does not fit, more ids than the backend takes,
            or an unknown backend.
        NotImplementedError: a pool whose layout, element type or page form this backend does not
            serve, or `interpret` where there is no kernel to interpret.
    """
    module = _module_for(kv, backend, interpret)
    count = _count("source", source)
    _expect_ids("target", target, count)
    return module.copy(kv, source, target, interpret=interpret) if count else kv


def gather_pages(
    kv: KVPages, page_ids: jax.Array, *, backend: str = "auto", interpret: object = None
) -> jax.Array:
    """Copy pages out of one layer's pool into a contiguous buffer, in the canonical format.

    Args:
        kv: one layer's pages; not changed.
        page_ids: i32[n], each in [0, num_pages), repeated or not. Entries 0 are padding: what comes
            out for them may be anything.
        backend, interpret: as `copy_pages`.

    Returns:
        [n, K, 2, page, D] of the pool's dtype.

    Raises:
        ValueError, NotImplementedError: as `copy_pages`.
    """
    module = _module_for(kv, backend, interpret)
    if _count("page_ids", page_ids):
        return module.gather(kv, page_ids, interpret=interpret)
    return jnp.zeros(_canonical_shape(kv, 0), kv.dtype)


def scatter_pages(
    kv: KVPages,
    page_ids: jax.Array,
    pages: jax.Array,
    *,
    backend: str = "auto",
    interpret: object = None,
) -> KVPages:
    """Overwrite pages of one layer's pool with those in a contiguous buffer; undoes `gather_pages`.

    Args:
        kv: one layer's pages. Donate it to have it updated in place.
        page_ids: i32[n], each in [0, num_pages), distinct but for 0, which is padding.
        pages: [n, K, 2, page, D] of the pool's dtype.
        backend, interpret: as `copy_pages`.

    Returns:
        The pool with those pages replaced.

    Raises:
        ValueError, NotImplementedError: as `copy_pages`.
    """
    module = _module_for(kv, backend, interpret)
    count = _count("page_ids", page_ids)
    shape = _canonical_shape(kv, count)
    if pages.shape != shape or pages.dtype != kv.dtype:
        found = f"{pages.dtype}{list(pages.shape)}"
        raise ValueError(f"pages: {found}, expected {kv.dtype}{list(shape)}")
    return module.scatter(kv, page_ids, pages, interpret=interpret) if count else kv


def check_copies(source: np.ndarray, target: np.ndarray, num_pages: int) -> None:
    """Check on the host what `copy_pages` asks of its pairs.

    Args:
        source: i32[n], pages to read.
        target: i32[n], pages to overwrite.
        num_pages: pages in the pool, the null page included.

    Raises:
        ValueError: arrays of other forms; a page outside the pool; page 0 in a pair that is no
            padding; a page overwritten twice, or overwritten and read. The pair is named.
    """
    source, target = np.asarray(source), np.asarray(target)
    for name, array in (("source", source), ("target", target)):
        if array.shape != (source.size,) or array.dtype != np.int32:
            raise ValueError(
                f"{name}: {array.dtype}{list(array.shape)}, expected int32[{source.size}]"
            )
    pairs = list(enumerate(zip(source.tolist(), target.tolist(), strict=True)))
    copies = [(i, pair) for i, pair in pairs if pair != (0, 0)]
    readers = {pair[0]: i for i, pair in copies}
    writers: dict[int, int] = {}
    for i, (read, written) in copies:
        name = f"copies[{i}] = ({read}, {written})"
        for page in (read, written):
            if not 0 < page < num_pages:
                raise ValueError(f"{name}: page {page} is not in [1, {num_pages})")
        if written in writers:
            raise ValueError(f"{name}: copies[{writers[written]}] overwrites page {written} too")
        if written in readers:
            raise ValueError(f"{name}: copies[{readers[written]}] reads page {written}")
        writers[written] = i


def _module_for(kv: KVPages, backend: str, interpret: object) -> ModuleType:
    platform = capability = None
    if backend == "auto":  # else leave the device alone: a program may be compiled for another
        platform = jax.default_backend()
        capability = getattr(jax.devices()[0], "compute_capability", None)
    demand = dispatch.Demand(
        platform=platform,
        compute_capability=capability,
        kv_dtype=kv.dtype.name,
        layout=kv.layout,
        interpret=bool(interpret),
    )
    name, module = dispatch.page_copies(backend, demand)
    if kv.layout not in module.LAYOUTS:
        raise NotImplementedError(
            f"layout={kv.layout!r}: page copies of backend {name!r} read {', '.join(module.LAYOUTS)}"
        )
    return module


def _count(name: str, ids) -> int:
    """n, of ids i32[n]."""
    _expect_ids(name, ids, ids.size)
    return ids.size


def _expect_ids(name: str, ids, count: int) -> None:
    if ids.shape != (count,) or ids.dtype != jnp.int32:
        raise ValueError(f"{name}: {ids.dtype}{list(ids.shape)}, expected int32[{count}]")


def _canonical_shape(kv: KVPages, count: int) -> tuple[int, ...]:
    return count, kv.num_kv_heads, 2, kv.page_size, kv.head_dim
