"""KVPages: the canonical page format, shapes, bytes, and what a write touches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import page_bytes
from pallas_kernels.ragged_paged_attention import KVPages, layout
from pallas_kernels.ragged_paged_attention.call import Rows, Scales

SHAPE = {"num_pages": 6, "page_size": 4, "num_kv_heads": 3, "head_dim": 64}


def _counting(name, head_dim=64, dtype="float32"):
    """A pool whose every element is different, and its canonical content."""
    kv = KVPages.zeros(name, **SHAPE | {"head_dim": head_dim}, dtype=dtype)
    shape = (6, 3, 2, 4, head_dim)
    pages = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    pages = pages.astype(kv.dtype).astype(np.float32)  # what the pool can hold
    return kv.scatter(jnp.arange(6, dtype=jnp.int32), jnp.asarray(pages, kv.dtype)), pages


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype"),
    [
        *((name, 64, "float32") for name in layout.LAYOUTS),
        ("tpu", 64, "bfloat16"),  # three rows of a token in two words
        ("tpu", 64, "int8"),
        ("tpu", 128, "bfloat16"),
        ("tpu", 256, "float32"),
    ],
)
def test_gather_gives_back_what_scatter_took(name, head_dim, dtype):
    kv, pages = _counting(name, head_dim, dtype)
    ids = jnp.array([4, 1, 1], jnp.int32)
    np.testing.assert_array_equal(kv.gather(ids), pages[[4, 1, 1]])
    moved = kv.scatter(jnp.array([2], jnp.int32), kv.gather(jnp.array([5], jnp.int32)))
    pages[2] = pages[5]
    np.testing.assert_array_equal(moved.gather(jnp.arange(6, dtype=jnp.int32)), pages)


def rows_of(*arrays: list[int]) -> Rows:
    return Rows(*(jnp.array(a, jnp.int32) for a in arrays), ranges=None)


@pytest.mark.parametrize("name", layout.LAYOUTS)
def test_write_touches_its_slots_and_the_null_page_only(name):
    kv, pages = _counting(name)
    new = jnp.full((5, 3, 64), -1.0), jnp.full((5, 3, 64), -2.0)
    # row 0: position 4 alone, in page 5; row 1: positions 2, 3 in page 2 and 4 in page 1 (page 3 is the
    # row's first, but kv_starts says its slots begin at 0); one padding token
    written = layout.write(
        kv,
        *new,
        rows_of([5, 5, 0], [4, 5, 2, 1, 0, 0], [0, 0, 0], [0, 1, 4, 4]),
        Scales(None, None),
    )
    for page, offset in [(5, 0), (2, 2), (2, 3), (1, 0)]:
        pages[page, :, 0, offset], pages[page, :, 1, offset] = -1.0, -2.0
    got = np.asarray(written.gather(jnp.arange(6, dtype=jnp.int32)))
    np.testing.assert_array_equal(got[1:], pages[1:])
    assert (got[0] != pages[0]).any()  # the padding token went there


def test_write_counts_from_kv_starts():
    kv, pages = _counting("split")
    one = jnp.full((1, 3, 64), -1.0)
    written = layout.write(
        kv,
        one,
        one,
        rows_of([14], [3, 1], [8], [0, 1]),
        Scales(None, None),
    )
    pages[1, :, :, 1] = -1.0  # position 13 is the row's slot 5
    np.testing.assert_array_equal(written.gather(jnp.arange(6, dtype=jnp.int32)), pages)


def test_token_places_skip_rows_without_tokens():
    places = layout.token_places(
        6, jnp.array([9, 4, 7, 0], jnp.int32), jnp.array([0, 1, 1, 4, 4], jnp.int32)
    )
    np.testing.assert_array_equal(places.live, [True] * 4 + [False] * 2)
    np.testing.assert_array_equal(places.row[:4], [0, 2, 2, 2])
    np.testing.assert_array_equal(places.position[:4], [8, 4, 5, 6])


def test_8_bit_values_saturate():
    x = jnp.full((1, 1, 2), 1e4)
    scale = jnp.ones(1)
    for dtype, most in [("int8", 127.0), ("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)]:
        got = layout.encode(x * 10, jnp.dtype(dtype), scale)
        np.testing.assert_array_equal(np.asarray(got, np.float32), most)


@pytest.mark.parametrize("name", layout.LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_abstract_zeros_and_page_bytes_agree(name, dtype):
    abstract = KVPages.abstract(name, **SHAPE, dtype=dtype)
    zeros = KVPages.zeros(name, **SHAPE, dtype=dtype)
    assert jax.tree.structure(abstract) == jax.tree.structure(zeros)
    assert [(a.shape, a.dtype) for a in abstract.data] == [(z.shape, z.dtype) for z in zeros.data]
    assert (zeros.num_pages, zeros.dtype) == (6, jnp.dtype(dtype))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(zeros))
    assert total == 6 * page_bytes.page_bytes(name, 4, 3, 64, dtype)


def test_tpu_pages_are_rows_of_128_lanes_in_32_bit_words():
    def shape(head_dim, dtype):
        return KVPages.abstract("tpu", 7, 16, 3, head_dim, dtype).data[0].shape

    assert shape(64, "float32") == (7, 16, 3, 1, 128)
    assert shape(64, "bfloat16") == (7, 16, 2, 2, 128)
    assert shape(64, "int8") == (7, 16, 1, 4, 128)
    assert shape(128, "bfloat16") == (7, 16, 3, 2, 128)
    assert shape(256, "float8_e4m3fn") == (7, 16, 3, 4, 128)
    with pytest.raises(ValueError, match="head_dim=96"):
        shape(96, "bfloat16")


def test_a_tpu_token_holds_keys_and_values_in_the_documented_order():
    k, v = jnp.arange(2.0)[:, None] + jnp.zeros((2, 64)), jnp.arange(2.0)[:, None] + 10.0
    rows = layout.pack_tpu_rows(k, v + jnp.zeros((2, 64)))[:, 0]  # [2, 128]
    np.testing.assert_array_equal(rows[:, 0], [0, 1])
    np.testing.assert_array_equal(rows[:, 64], [10, 11])
    rows = layout.pack_tpu_rows(jnp.tile(k, (1, 4)), jnp.tile(k + 10.0, (1, 4)))[:, 0]
    np.testing.assert_array_equal(rows[:, 0], [0, 0, 10, 10, 1, 1, 11, 11])


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="layout='rows'"):
        KVPages.zeros("rows", **SHAPE, dtype="float32")
    with pytest.raises(ValueError, match="layout='rows'"):
        page_bytes.page_bytes("rows", 4, 3, 8, "float32")
    with pytest.raises(ValueError, match="dtype='int3'"):
        page_bytes.page_bytes("split", 4, 3, 8, "int3")
