"""What the compiler makes of xla.py: pools written in place without a copy, exact f32 products."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ragged_paged_attention import KVPages, ragged_paged_attention, xla
from tests.pallas_kernels.ragged_cases import array_args, make_case, make_pages

NUM_PAGES = 200  # so that a pool outweighs every temporary


def _layers(q, pools, args):
    """Two layers, each with a pool of its own, as an unrolled model has them."""
    new = []
    for kv in pools:
        q, kv, _ = ragged_paged_attention(q, kv=kv, **args, sm_scale=0.2, backend="xla")
        new.append(kv)
    return q, new


def _arguments(rows, pages_per_row, kv_dtype="float32"):
    case = make_case(
        rows,
        pages_per_row=pages_per_row,
        num_pages=NUM_PAGES * 4 // jnp.dtype(kv_dtype).itemsize,
        page=16,
        heads=(9, 3),
        head_dim=64,
        kv_dtype=kv_dtype,
    )
    pools = [make_pages(case, "xla") for _ in range(2)]
    return jnp.asarray(case.q), pools, array_args(case)


def _pool_copies(compiled, pool) -> int:
    """Copies in the program text of anything as large as one array of the pool."""
    size = pool.data[0].size
    shapes = re.findall(r"\[([\d,]+)\]\S* copy(?:-start)?\(", compiled.as_text())
    return sum(math.prod(map(int, shape.split(","))) >= size for shape in shapes)


@pytest.mark.parametrize(
    ("rows", "pages_per_row", "kv_dtype"),
    [
        ([(1, 9)], 1, "float32"),
        ([(1, 9)], 4, "float32"),
        ([(1, 9), (1, 16)], 1, "float32"),
        ([(1, 9), (1, 16)], 4, "float32"),
        ([(1, 9), (5, 7)], 4, "float32"),
        ([(1, 9), (5, 7)], 4, "int8"),
        ([(1, 9)], 4, "float8_e4m3fn"),
        ([(1, 9), (5, 7)], 4, "float8_e4m3fn"),
    ],
)
def test_pools_are_updated_in_place_without_a_copy(rows, pages_per_row, kv_dtype):
    q, pools, args = _arguments(rows, pages_per_row, kv_dtype)
    compiled = jax.jit(_layers, donate_argnums=1).lower(q, pools, args).compile()
    pool_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(pools))
    memory = compiled.memory_analysis()
    assert _pool_copies(compiled, pools[0]) == 0
    assert memory.temp_size_in_bytes < pools[0].data[0].nbytes
    assert memory.alias_size_in_bytes == pool_bytes

    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pools)]
    _, new = compiled(q, pools, args)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(new)] == pointers
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(pools))


def test_the_copy_check_finds_the_copies_of_an_undonated_pool():
    q, pools, args = _arguments([(1, 9)], 4)
    compiled = jax.jit(_layers).lower(q, pools, args).compile()
    assert _pool_copies(compiled, pools[0]) == 4  # keys and values of two layers


def test_the_copy_check_finds_a_missing_barrier(monkeypatch):
    """Without the barrier between write and read, one row copies whole pools, donated or not."""
    monkeypatch.setattr(xla.lax, "optimization_barrier", lambda x: x)
    q, pools, args = _arguments([(1, 9)], 3)  # a shape of its own: attention's trace is cached
    compiled = jax.jit(_layers, donate_argnums=1).lower(q, pools, args).compile()
    assert _pool_copies(compiled, pools[0]) > 0
    assert compiled.memory_analysis().temp_size_in_bytes > pools[0].data[0].nbytes


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_f32_products_ask_for_full_precision(num_tokens):
    q, pools, args = _arguments([(num_tokens, 310)], 20)
    text = jax.jit(_layers).lower(q, pools, args).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) >= 4
    assert all("[HIGHEST, HIGHEST]" in line for line in products)


def test_many_layers_are_traced_once():
    """An unrolled model must not pay for tracing attention once per layer."""
    q, pools, args = _arguments([(1, 9)], 4)
    text = jax.jit(_layers).lower(q, pools, args).as_text()
    assert len(re.findall(r"func\.func private @_attend", text)) == 1
    assert len(re.findall(r"call @_attend", text)) == 2


def test_tuned_blocks_follow_the_page_size():
    for page in (4, 16, 64, 256, 1024):
        for num_tokens in (1, 2, 64, 65, 512):
            pages, tiles = xla.default_blocks(num_tokens, page)
            assert 1 <= pages <= 128
            assert all(tokens >= 32 and count >= 1 for tokens, count in tiles)
            assert len(tiles) == (1 if num_tokens <= 64 else 2)


def _temp_bytes(num_tokens: int, context: int, attend) -> int:
    """Temporaries of one layer's attention: a chunk of one row over its context, by shapes alone."""
    page, heads, kv_heads, head_dim = 64, 9, 3, 64
    pages_per_row = context // page
    shapes = {
        "q": ((num_tokens, heads, head_dim), jnp.float32),
        "k_new": ((num_tokens, kv_heads, head_dim), jnp.float32),
        "v_new": ((num_tokens, kv_heads, head_dim), jnp.float32),
        "kv_lens": ((1,), jnp.int32),
        "page_table": ((pages_per_row,), jnp.int32),
        "kv_starts": ((1,), jnp.int32),
        "cu_q_lens": ((2,), jnp.int32),
        "ranges": ((3,), jnp.int32),
    }
    args = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
    args["kv"] = KVPages.abstract("split", pages_per_row + 1, page, kv_heads, head_dim, jnp.float32)
    compiled = jax.jit(attend, donate_argnames="kv").lower(**args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def _paged(**args):
    out, kv, _ = ragged_paged_attention(**args, sm_scale=0.2, backend="xla")
    return out, kv


def _dense(*, q, k_new, v_new, kv, **_):
    """The control: attention with its whole matrix of scores."""
    grouped = q.reshape(q.shape[0], 3, 3, 64)
    scores = jnp.einsum("tkgd,ckd->kgtc", grouped, k_new)
    return jnp.einsum("kgtc,ckd->tkgd", jax.nn.softmax(scores, axis=-1), v_new), kv


def test_temporaries_grow_linearly_with_chunk_and_context():
    """FlashAttention's claim: no matrix of scores. Four times the tokens take four times the bytes."""
    small, large = _temp_bytes(512, 512, _paged), _temp_bytes(2048, 2048, _paged)
    assert large <= 4.4 * small
    assert _temp_bytes(512, 8192, _paged) <= 1.1 * small  # more context: hardly any more
    assert _temp_bytes(2048, 2048, _dense) >= 12 * _temp_bytes(512, 512, _dense)
