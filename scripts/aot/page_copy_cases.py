"""The page copies that scripts/tpu_aot and scripts/gpu_aot compile.

Called by their workers. Invariant: argument 0 is the pool, larger than what a compiler may move whole
to faster memory; it is donated where the copy writes to it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.page_bytes import page_bytes
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pallas_kernels.ragged_paged_attention import KVPages

MIN_POOL_BYTES = 256 * 2**20
PAGE_SIZES = {"tpu": 32, "gpu": 64}
NUM_IDS = 64
# (K, D): SmolLM2, Llama 3 8B, one wide KV head.
HEADS = [(3, 64), (8, 128), (1, 256)]
DTYPES = ["bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"]


class PageCopy(NamedTuple):
    """One program to compile: jit `function`, donate `donate`, lower with `arguments`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # trees of jax.ShapeDtypeStruct; the first is KVPages
    donate: tuple[int, ...]  # () where the pool is only read


def page_copies(platform: str) -> dict[str, PageCopy]:
    """What to compile for a platform, by name.

    Args:
        platform: "tpu" or "gpu".

    Returns:
        Its kernels for every form of HEADS and element type, and plain XLA over the layouts that
        may be found there.
    """
    own = {"tpu": "tpu", "gpu": "head_major"}[platform]
    forms = [(platform, own, heads, "bfloat16") for heads in HEADS]
    forms += [(platform, own, HEADS[1], dtype) for dtype in DTYPES[1:]]
    forms += [
        ("xla", layout, HEADS[1], dtype)
        for layout in (own, "split")
        for dtype in ("bfloat16", "float8_e4m3fn")
    ]
    cases = {}
    for backend, layout, (kv_heads, head_dim), dtype in forms:
        page_size = PAGE_SIZES[platform]
        kv = _pool(layout, page_size, kv_heads, head_dim, dtype)
        for name, case in _moves(kv, backend).items():
            cases[f"{name} {backend} {layout} {kv_heads}/{head_dim} {dtype}"] = case
    return cases


def _pool(layout: str, page_size: int, kv_heads: int, head_dim: int, dtype: str) -> KVPages:
    one_page = page_bytes(layout, page_size, kv_heads, head_dim, dtype)
    num_pages = MIN_POOL_BYTES // one_page + 1
    if layout == "split":
        num_pages *= 2  # of either array, as there are two
    return KVPages.abstract(layout, num_pages, page_size, kv_heads, head_dim, dtype)


def _moves(kv: KVPages, backend: str) -> dict[str, PageCopy]:
    ids = jax.ShapeDtypeStruct((NUM_IDS,), jnp.int32)
    shape = NUM_IDS, kv.num_kv_heads, 2, kv.page_size, kv.head_dim
    pages = jax.ShapeDtypeStruct(shape, kv.dtype)
    of = functools.partial(functools.partial, backend=backend)
    return {
        "copy": PageCopy(of(copy_pages), (kv, ids, ids), (0,)),
        "gather": PageCopy(of(gather_pages), (kv, ids), ()),
        "scatter": PageCopy(of(scatter_pages), (kv, ids, pages), (0,)),
    }
