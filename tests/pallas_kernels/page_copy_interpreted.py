"""Page copies against NumPy, and their kernels in Pallas' interpreters, run by test_page_copy.py.

A wrong wait makes an interpreter hang, so it stands in a process of its own, with a time limit set by
the test. Prints one JSON object a line, as soon as a case or a control is done:

    python -m tests.pallas_kernels.page_copy_interpreted tpu|gpu cases|controls

The interpreters fill what nobody wrote with NaN and detect races; that of TPU refuses to read out of
bounds.
"""

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import compat
from pallas_kernels.page_copy import check_copies, copy_pages, gather_pages, scatter_pages, tpu
from pallas_kernels.ragged_paged_attention import KVPages

DTYPES = ["float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"]
NUM_PAGES = 24
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """A pool of random bits, many of them NaN of every payload, and what it holds.

    Args:
        layout: physical layout.
        dtype: element type.
        page_size, kv_heads, head_dim: B, K, D.
    """

    layout: str
    dtype: str
    page_size: int = 4
    kv_heads: int = 3
    head_dim: int = 64

    @functools.cached_property
    def pages(self) -> np.ndarray:
        """Canonical pages, as unsigned integers of the same width."""
        bits = BITS[jnp.dtype(self.dtype).itemsize]
        shape = (NUM_PAGES, self.kv_heads, 2, self.page_size, self.head_dim)
        return np.random.default_rng(0).integers(0, np.iinfo(bits).max, shape, bits, endpoint=True)

    def make(self) -> KVPages:
        """The pool on the device; made of integers, whose bits nobody changes."""
        shape = NUM_PAGES, self.page_size, self.kv_heads, self.head_dim
        kv = KVPages.zeros(self.layout, *shape, self.pages.dtype)
        kv = kv.scatter(jnp.arange(NUM_PAGES, dtype=jnp.int32), jnp.asarray(self.pages))
        like = KVPages.abstract(self.layout, *shape, self.dtype)
        views = (np.asarray(a).view(b.dtype) for a, b in zip(kv.data, like.data, strict=True))
        return dataclasses.replace(like, data=tuple(map(jnp.asarray, views)))


def bits_of(array) -> np.ndarray:
    """An array's elements as unsigned integers."""
    return np.asarray(array).view(BITS[array.dtype.itemsize])


def content(kv: KVPages) -> np.ndarray:
    """Canonical pages of a whole pool, as `Pool.pages`."""
    data = tuple(jnp.asarray(bits_of(a)) for a in kv.data)
    bits = dataclasses.replace(kv, data=data, dtype=data[0].dtype)
    return np.asarray(bits.gather(jnp.arange(kv.num_pages, dtype=jnp.int32)))


def check_copy(pool: Pool, options: dict[str, Any], count: int = 11, padding: bool = True) -> None:
    """Raises unless `copy_pages` does what NumPy does, to the bit. More copies than are in flight."""
    ids = np.random.default_rng(1).permutation(np.arange(1, NUM_PAGES, dtype=np.int32))
    source, target = ids[:count].copy(), ids[-count:].copy()
    source[-1] = source[0]  # one page may have several copies
    if padding:
        source, target = (
            np.concatenate([[0], x, [0, 0]]).astype(np.int32) for x in (source, target)
        )
    check_copies(source, target, NUM_PAGES)
    copy = jax.jit(functools.partial(copy_pages, **options))
    kv = copy(pool.make(), jnp.asarray(source), jnp.asarray(target))
    want = pool.pages.copy()
    want[target] = want[source]
    np.testing.assert_array_equal(content(kv)[1:], want[1:])


def check_gather(pool: Pool, options: dict[str, Any]) -> None:
    """Raises unless `gather_pages` does what NumPy does, to the bit."""
    ids = np.array([0, 3, 23, 3, 7, 1, 2, 9, 11, 13, 0], np.int32)
    pages = jax.jit(functools.partial(gather_pages, **options))(pool.make(), jnp.asarray(ids))
    assert pages.dtype == pool.dtype
    np.testing.assert_array_equal(bits_of(pages)[1:-1], pool.pages[ids][1:-1])


def check_scatter(pool: Pool, options: dict[str, Any]) -> None:
    """Raises unless `scatter_pages` does what NumPy does, to the bit."""
    ids = np.array([0, 3, 23, 0, 7, 1, 2, 9, 11, 13, 0], np.int32)
    new = np.random.default_rng(2).permutation(pool.pages)[: len(ids)]
    scatter = jax.jit(functools.partial(scatter_pages, **options))
    kv = scatter(pool.make(), jnp.asarray(ids), jnp.asarray(new.view(pool.dtype)))
    want = pool.pages.copy()
    want[ids] = new
    np.testing.assert_array_equal(content(kv)[1:], want[1:])


CHECKS = {"copy": check_copy, "gather": check_gather, "scatter": check_scatter}
LAYOUT_OF = {"tpu": "tpu", "gpu": "head_major"}
# Name -> what to check, and the fields of the pool. A large page is several pieces on GPU.
CASES = {
    f"{name} {dtype}": (check, {"dtype": dtype})
    for (name, check), dtype in itertools.product(CHECKS.items(), DTYPES)
} | {
    f"{name} large pages": (
        check,
        {"dtype": "float32", "page_size": 64, "kv_heads": 2, "head_dim": 128},
    )
    for name, check in CHECKS.items()
}


OVERWRITTEN = "a page is overwritten twice"


def overwrite_twice(pool: Pool, options: dict[str, Any]) -> None:
    """What `copy_pages` forbids. The race detector for GPU sees it, that for TPU does not."""
    source, target = jnp.array([1, 2], jnp.int32), jnp.array([3, 3], jnp.int32)
    kv = jax.jit(functools.partial(copy_pages, **options))(pool.make(), source, target)
    jax.block_until_ready(kv)


def no_wait(*args, **kwargs) -> None:
    """In the place of a wait."""


# Backend -> what is broken -> (what holds the wait, its name, what stands there instead).
BROKEN: dict[str, dict[str, tuple[Any, str, Callable]]] = {
    "tpu": {"copies are not waited for": (tpu._Copies, "wait", no_wait)},
    "gpu": {
        "loads are not waited for": (compat, "barrier_wait", no_wait),
        "stores are not waited for": (compat, "wait_smem_to_gmem", no_wait),
    },
}


def options_of(backend: str) -> dict[str, Any]:
    if backend == "tpu":
        interpret = compat.TpuInterpretParams(detect_races=True, dma_execution_mode="on_wait")
    else:
        interpret = compat.GpuInterpretParams(detect_races=True)
    return {"backend": backend, "interpret": interpret}


def fault_of(backend: str, check: Callable, fields: dict[str, Any]) -> str:
    """What went wrong, in short; "" where all is well."""
    try:
        check(Pool(layout=LAYOUT_OF[backend], **fields), options_of(backend))
        if compat.tpu_races_found() or compat.gpu_races_found():
            raise RuntimeError("RACE DETECTED")
    except Exception as error:  # noqa: BLE001 whatever it is, the test wants to see it
        kind = "race" if "RACE DETECTED" in str(error) else type(error).__name__
        return f"{kind}: {error}"[:2000]
    finally:
        compat.reset_tpu_interpreter()
        compat.reset_gpu_interpreter()
    return ""


def results(backend: str, which: str) -> Iterator[dict[str, str]]:
    """{name, fault} of every case, or of every control."""
    if which == "cases":
        for name, case in CASES.items():
            yield {"name": name, "fault": fault_of(backend, *case)}
        return
    yield {"name": "sound", "fault": fault_of(backend, *CASES["copy float32"])}
    fault = fault_of(backend, overwrite_twice, {"dtype": "float32"})
    yield {"name": OVERWRITTEN, "fault": fault}
    for name, (holder, attribute, broken) in BROKEN[backend].items():
        sound = getattr(holder, attribute)
        setattr(holder, attribute, broken)
        jax.clear_caches()  # the traces of the kernel before
        yield {"name": name, "fault": fault_of(backend, *CASES["copy float32"])}
        setattr(holder, attribute, sound)


def main(backend: str, which: str) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    for result in results(backend, which):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
