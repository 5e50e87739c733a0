"""xla.py and reference.py against each other and against a NumPy f64 softmax, over ragged batches.

Every case poisons with NaN what may not be read (see ragged_cases), so agreement also means that no
unwritten slot, foreign page or null page reached a live token.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from tests.pallas_kernels.ragged_cases import array_args, make_case, make_pages, oracle

SCALE = 0.2
# Small enough that the tiny cases take several steps, tiles and blocks, and both tile sizes.
SMALL_BLOCKS = (3, ((2, 1), (4, 2)))
BUCKET = {"num_tokens": 24, "num_rows": 6, "pages_per_row": 8, "num_pages": 50}
MIXES = {
    "single tokens": [(1, 1), (1, 4), (1, 5), (1, 17), (1, 32)],
    "one single token": [(1, 9)],
    "one chunk": [(24, 24)],
    "chunk after a prefix": [(7, 32)],
    "chunks": [(2, 2), (3, 11), (5, 5), (13, 20)],
    "mixed": [(1, 8), (1, 3), (2, 9), (4, 4), (9, 31)],
    "chunk of one page": [(4, 4), (4, 8)],
    "row without tokens": [(1, 6), (0, 5), (6, 6)],
    "full bucket": [(1, 2), (1, 32), (2, 2), (4, 6), (8, 8), (8, 30)],
    "no rows": [],
}


@functools.cache
def _compiled(backend, **options):
    return jax.jit(
        functools.partial(ragged_paged_attention, sm_scale=SCALE, backend=backend, **options)
    )


def run(case, backend, *, pages=None, sinks=None, **options):
    """(out, lse, pages) as NumPy; out and lse f64."""
    if backend == "reference":
        options.pop("blocks", None)
    args = array_args(case) | {"sinks": None if sinks is None else jnp.asarray(sinks)}
    options = {name: value for name, value in options.items() if value is not None}
    call = _compiled(backend, return_lse=True, **options)
    kv = make_pages(case, backend) if pages is None else pages
    out, kv, lse = call(jnp.asarray(case.q), kv=kv, **args)
    assert out.dtype == case.q.dtype
    kv = kv.gather(jnp.arange(len(case.before), dtype=jnp.int32))
    return np.asarray(out, np.float64), np.asarray(lse, np.float64), np.asarray(kv)


def same_pages(got, want):
    """Bit for bit; of an 8-bit float any NaN will do, as its conversions do not keep which."""
    assert got.dtype == want.dtype
    if got.dtype.itemsize == 1:
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    else:
        assert got.tobytes() == want.tobytes()


def check(case, backend, *, sinks=None, blocks=SMALL_BLOCKS, tolerance=3e-6, **options):
    out, lse, pages = run(case, backend, sinks=sinks, blocks=blocks, **options)
    want, want_lse = oracle(case, sm_scale=SCALE, sinks=sinks, **options)
    np.testing.assert_allclose(out, want, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, want_lse, atol=3e-6, rtol=3e-6)
    assert (
        pages[1:].tobytes() == case.after[1:].tobytes()
    )  # page 0 takes the padding tokens' writes


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("rows", MIXES.values(), ids=MIXES)
def test_ragged_mixes_match_a_plain_softmax(rows, backend):
    check(make_case(rows, **BUCKET), backend)


@st.composite
def ragged_rows(draw):
    singles = draw(st.integers(0, 4))
    counts = [1] * singles
    for _ in range(draw(st.integers(0, 6 - singles))):
        room = 24 - sum(counts)
        if room >= 2:
            counts.append(draw(st.integers(2, room)))
    counts = sorted(counts)
    return [(n, n + draw(st.integers(0, 32 - n))) for n in counts]


@settings(max_examples=40, deadline=None)
@given(rows=ragged_rows(), seed=st.integers(0, 1000))
def test_any_ragged_batch_matches_a_plain_softmax(rows, seed):
    check(make_case(rows, seed=seed, **BUCKET), "xla")


@pytest.mark.parametrize(
    ("page", "heads", "head_dim"),
    [
        (4, (9, 3), 64),
        (16, (4, 1), 128),
        (16, (7, 7), 32),
        (64, (8, 2), 64),
    ],
)
def test_head_and_page_shapes_with_the_tuned_blocks(page, heads, head_dim):
    rows = [(1, 70), (1, 1), (3, 5), (20, 77)]
    case = make_case(rows, num_tokens=32, page=page, heads=heads, head_dim=head_dim)
    check(case, "xla", blocks=None)


def test_long_rows_take_the_large_tile_and_short_ones_the_small():
    rows = [(1, 90), (1, 130), (20, 33), (70, 200), (150, 150)]
    case = make_case(rows, num_tokens=256, page=16)
    check(case, "xla", blocks=None)


def test_one_token_bucket():
    check(make_case([(1, 30)], pages_per_row=8, num_rows=6), "xla", blocks=None)


def test_without_new_tokens_the_pages_are_read_as_they_are():
    case = make_case(MIXES["mixed"], **BUCKET)
    out, lse, _ = run(case, "xla", blocks=SMALL_BLOCKS)
    filled = dataclasses.replace(case, before=case.after, k_new=None, v_new=None)
    again, lse_again, pages = run(filled, "xla", blocks=SMALL_BLOCKS)
    np.testing.assert_array_equal(out, again)
    np.testing.assert_array_equal(lse, lse_again)
    same_pages(pages, case.after)  # page 0 too: nothing was written


def _alone(x, at):
    """Tokens `at` of x and zeros behind them, in a bucket of 12."""
    return np.concatenate([x[at], np.zeros((12 - len(x[at]), *x.shape[1:]), x.dtype)])


def test_a_row_does_not_depend_on_neighbours_or_bucket():
    rows = MIXES["mixed"]
    case = make_case(rows, **BUCKET)
    together, _, _ = run(case, "xla", blocks=SMALL_BLOCKS)
    table = case.page_table.reshape(BUCKET["num_rows"], -1)
    for r, (count, length) in enumerate(rows):
        at = slice(case.cu_q_lens[r], case.cu_q_lens[r + 1])
        alone = dataclasses.replace(
            case,
            q=_alone(case.q, at),
            k_new=_alone(case.k_new, at),
            v_new=_alone(case.v_new, at),
            kv_lens=np.array([length, 0], np.int32),
            kv_starts=np.zeros(2, np.int32),
            page_table=np.concatenate([table[r], 0 * table[r]]),
            cu_q_lens=np.array([0, count, count], np.int32),
            ranges=np.array([count == 1, count == 1, 1], np.int32),
        )
        out, _, _ = run(alone, "xla", blocks=SMALL_BLOCKS)
        np.testing.assert_allclose(out[:count], together[at], atol=1e-6, rtol=1e-6)
        assert not out[count:].any()


def test_the_poison_is_seen_when_it_is_live():
    """The control of this file's NaN: one poisoned slot inside a row's context spoils that row alone."""
    case = make_case([(1, 5), (6, 9)], **BUCKET)
    page_of_row_1 = case.page_table.reshape(BUCKET["num_rows"], -1)[1, 0]
    before = case.before.copy()
    before[page_of_row_1, :, :, 1] = np.nan
    out, _, _ = run(dataclasses.replace(case, before=before), "xla", blocks=SMALL_BLOCKS)
    assert np.isnan(out[1:7]).all()
    assert np.isfinite(out[0]).all()


def test_one_key_less_is_noticed():
    """The control of the comparison: a length that is wrong by one fails it."""
    case = make_case(MIXES["mixed"], **BUCKET)
    shorter = dataclasses.replace(case, kv_lens=case.kv_lens - (case.kv_lens == 31))
    out, _, _ = run(shorter, "xla", blocks=SMALL_BLOCKS)
    want, _ = oracle(case, sm_scale=SCALE)
    assert np.abs(out - want).max() > 1e-3


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_interpret_is_refused_by_name(backend):
    case = make_case([(1, 3)])
    with pytest.raises(NotImplementedError, match="interpret"):
        ragged_paged_attention(
            jnp.asarray(case.q),
            kv=make_pages(case, backend),
            **array_args(case),
            sm_scale=SCALE,
            backend=backend,
            interpret=True,
        )
