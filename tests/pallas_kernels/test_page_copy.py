"""Page copies: to the bit, in place, and what is refused.

The kernels run in Pallas' interpreters (page_copy_interpreted.py); what compilers make of them,
scripts/tpu_aot and scripts/gpu_aot report.
"""

import functools
import itertools
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.page_copy import check_copies, copy_pages, gather_pages, gpu, scatter_pages
from pallas_kernels.ragged_paged_attention import KVPages, layout
from tests.pallas_kernels import page_copy_interpreted as interpreted
from tests.pallas_kernels.child import faults
from tests.pallas_kernels.page_copy_interpreted import CHECKS, DTYPES, Pool

XLA = {"backend": "xla"}
I32 = jnp.int32


@pytest.fixture(scope="module")
def outcome():
    """(backend, "cases" or "controls") -> name -> fault; each child runs once."""
    module = interpreted.__name__
    return functools.cache(lambda backend, which: faults(module, backend, which, limit_s=120))


BACKENDS = [
    pytest.param("tpu", marks=pytest.mark.interpret),
    pytest.param("gpu", marks=pytest.mark.gpu_interpret),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", interpreted.CASES)
def test_the_interpreted_kernel_is_right_and_has_no_race(backend, name, outcome):
    assert outcome(backend, "cases").get(name, "hung, or the child died") == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_broken_kernel_and_a_broken_contract_are_caught(backend, outcome):
    faults = outcome(backend, "controls")
    assert faults["sound"] == ""
    if backend == "gpu":
        assert faults[interpreted.OVERWRITTEN].startswith("race")
    for name in interpreted.BROKEN[backend]:
        assert faults.get(name, "hung") != ""


# -- plain XLA


@pytest.mark.parametrize("name", layout.LAYOUTS)
@pytest.mark.parametrize("dtype", [*DTYPES, "float16"])
@pytest.mark.parametrize("check", CHECKS)
def test_xla_moves_pages_to_the_bit(name, dtype, check):
    CHECKS[check](Pool(layout=name, dtype=dtype), XLA)


@pytest.mark.parametrize("name", layout.LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_xla_copies_a_single_page(name, dtype):
    """XLA makes another program of it."""
    interpreted.check_copy(Pool(layout=name, dtype=dtype), XLA, count=1, padding=False)


def written(name: str, dtype: str, move: str, count: int):
    """Of a donated pool: its addresses before, the program's memory, the pool after."""
    kv = KVPages.zeros(name, 512, 16, 3, 64, dtype)
    before = [a.unsafe_buffer_pointer() for a in kv.data]
    ids = jnp.arange(1, count + 1, dtype=I32)
    if move == "copy":
        arguments = (ids, ids + I32(count))
    else:
        arguments = (ids, jnp.ones((count, 3, 2, 16, 64), jnp.dtype(dtype)))
    function = functools.partial(copy_pages if move == "copy" else scatter_pages, **XLA)
    program = jax.jit(function, donate_argnums=0).lower(kv, *arguments).compile()
    after = program(kv, *arguments)
    assert all(a.is_deleted() for a in kv.data)
    memory = program.memory_analysis()
    assert memory is not None
    return before, memory, after


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(layout.LAYOUTS, ["float32", "bfloat16", "int8"]),
        ("split", "float8_e4m3fn"),  # held as bytes
    ],
)
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("move", ["copy", "scatter"])
def test_a_donated_pool_is_updated_in_place(name, dtype, count, move):
    before, memory, after = written(name, dtype, move, count)
    assert [a.unsafe_buffer_pointer() for a in after.data] == before
    pool_bytes = sum(a.nbytes for a in after.data)
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8  # the pages on their way, nothing more


def test_the_known_exception_a_float8_pool_on_cpu_is_copied():
    """XLA for CPU, layouts other than its own; when this fails, xla.py has an exception less to name."""
    before, memory, after = written("head_major", "float8_e4m3fn", "copy", 3)
    assert [a.unsafe_buffer_pointer() for a in after.data] == before
    assert memory.temp_size_in_bytes >= after.data[0].nbytes


# -- arguments


def small(name: str = "split") -> KVPages:
    return KVPages.zeros(name, 6, 4, 3, 64, "float32")


@pytest.mark.parametrize(
    ("name", "backend"), [("split", "xla"), ("tpu", "tpu"), ("head_major", "gpu")]
)
def test_no_pages_are_no_work(name, backend):
    kv, none = small(name), jnp.zeros(0, I32)
    options = {"backend": backend}
    assert copy_pages(kv, none, none, **options) is kv
    pages = gather_pages(kv, none, **options)
    assert (pages.shape, pages.dtype) == ((0, 3, 2, 4, 64), jnp.float32)
    assert scatter_pages(kv, none, pages, **options) is kv


def test_arguments_that_do_not_fit_are_refused_by_name():
    kv, ids = small(), jnp.array([1, 2], I32)
    with pytest.raises(ValueError, match=r"target: int32\[1\], expected int32\[2\]"):
        copy_pages(kv, ids, ids[:1])
    with pytest.raises(ValueError, match=r"source: int32\[1, 2\], expected int32\[2\]"):
        copy_pages(kv, ids[None], ids)
    with pytest.raises(ValueError, match=r"page_ids: uint32\[2\], expected int32\[2\]"):
        gather_pages(kv, ids.astype(jnp.uint32))
    pages = jnp.zeros((2, 3, 2, 4, 64))
    with pytest.raises(
        ValueError, match=r"pages: float32\[2, 3, 2, 4, 64\], expected float32\[1, "
    ):
        scatter_pages(kv, ids[:1], pages)
    with pytest.raises(ValueError, match=r"pages: bfloat16\["):
        scatter_pages(kv, ids, pages.astype(jnp.bfloat16))
    scatter_pages(kv, ids, pages)  # the control


def test_what_is_not_served_is_refused_by_name():
    ids = jnp.array([1], I32)
    with pytest.raises(ValueError, match="backend='triton'"):
        gather_pages(small(), ids, backend="triton")
    for backend, own in [("tpu", "tpu"), ("gpu", "head_major")]:
        with pytest.raises(NotImplementedError, match=f"layout='split': .*'{backend}' read {own}"):
            gather_pages(small(), ids, backend=backend)
        with pytest.raises(ValueError, match="interpret='yes'"):
            gather_pages(small(own), ids, backend=backend, interpret="yes")
    half = KVPages.zeros("tpu", 6, 4, 3, 64, "float16")
    with pytest.raises(NotImplementedError, match="kv dtype float16"):
        gather_pages(half, ids, backend="tpu")
    with pytest.raises(NotImplementedError, match="interpret=True"):
        gather_pages(small(), ids, backend="xla", interpret=True)


def test_more_ids_than_smem_holds_are_refused_on_tpu():
    def call(count):
        ids = jax.ShapeDtypeStruct((count,), I32)
        gather = functools.partial(gather_pages, backend="tpu")
        return jax.eval_shape(gather, KVPages.abstract("tpu", 6, 4, 3, 64, "float32"), ids)

    with pytest.raises(ValueError, match=r"122881 pages: their ids take 983048 bytes.* 983040"):
        call(122881)
    assert call(122880).shape == (122880, 3, 2, 4, 64)


def test_gpu_pages_are_cut_into_pieces_for_bulk_copies():
    for kv_heads, head_dim, itemsize, expected in [
        (8, 128, 2, 16384),  # one head's keys or values
        (3, 64, 2, 12288),
        (8, 128, 4, 16384),
        (1, 64, 1, 8192),  # the whole page
    ]:
        elements = 2 * kv_heads * 64 * head_dim
        assert gpu.piece_elements(elements, itemsize) * itemsize == expected
    with pytest.raises(NotImplementedError, match="pages of 24 bytes"):
        gpu.piece_elements(6, 4)
    with pytest.raises(NotImplementedError, match="pages of 40002 bytes"):
        gpu.piece_elements(20001, 2)


@pytest.mark.parametrize(
    ("platform", "layout_name", "kv_dtype", "expected"),
    [
        ("cpu", "split", "float32", "xla"),
        ("gpu", "split", "bfloat16", "xla"),
        ("tpu", "tpu", "bfloat16", "tpu"),
        ("tpu", "split", "bfloat16", "xla"),
        ("tpu", "tpu", "float16", "xla"),
    ],
)
def test_auto_takes_the_kernel_that_reads_the_pool(platform, layout_name, kv_dtype, expected):
    demand = dispatch.Demand(platform=platform, layout=layout_name, kv_dtype=kv_dtype)
    name, module = dispatch.page_copies("auto", demand)
    assert name == expected
    assert layout_name in module.LAYOUTS


@pytest.mark.parametrize("name", dispatch.BACKENDS)
def test_every_backend_has_page_copies_that_read_its_layout(name):
    _, module = dispatch.page_copies(name, dispatch.Demand())
    assert dispatch.BACKENDS[name].layout in module.LAYOUTS


# -- pairs, checked on the host


def pairs(*ids: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets."""
    both = np.array(ids, np.int32).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def test_good_pairs_pass():
    check_copies(*pairs(), 5)
    check_copies(*pairs((1, 2), (1, 3), (0, 0), (4, 5), (0, 0)), 6)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([(0, 0), (1, 6)], r"copies\[1\] = \(1, 6\): page 6 is not in \[1, 6\)"),
        ([(-1, 2)], r"copies\[0\] = \(-1, 2\): page -1"),
        ([(3, 0)], r"copies\[0\] = \(3, 0\): page 0"),
        ([(0, 3)], r"copies\[0\] = \(0, 3\): page 0"),
        ([(1, 3), (2, 3)], r"copies\[1\] = \(2, 3\): copies\[0\] overwrites page 3 too"),
        ([(1, 3), (3, 4)], r"copies\[0\] = \(1, 3\): copies\[1\] reads page 3"),
        ([(2, 2)], r"copies\[0\] = \(2, 2\): copies\[0\] reads page 2"),
    ],
)
def test_bad_pairs_are_named(ids, message):
    with pytest.raises(ValueError, match=message):
        check_copies(*pairs(*ids), 6)


def test_pairs_of_other_forms_are_refused():
    with pytest.raises(ValueError, match=r"source: int64\[1\], expected int32\[1\]"):
        check_copies(np.array([1]), np.array([2], np.int32), 6)
    with pytest.raises(ValueError, match=r"target: int32\[2\], expected int32\[1\]"):
        check_copies(np.array([1], np.int32), np.array([2, 3], np.int32), 6)


def test_the_programs_for_aot_are_callable(repository):
    """That what the AOT scripts compile can be traced; they are run with `-m aot`."""
    page_copies = runpy.run_path(str(repository / "scripts" / "aot" / "page_copy_cases.py"))
    for platform in ("tpu", "gpu"):
        for name, case in page_copies["page_copies"](platform).items():
            out = jax.eval_shape(case.function, *case.arguments)
            if case.donate:
                assert jax.tree.structure(out) == jax.tree.structure(case.arguments[0]), name
            else:
                assert (out.shape[0], out.dtype) == (64, case.arguments[0].dtype), name
