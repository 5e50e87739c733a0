"""Debug mode: what a kernel trusts of a batch is looked at, on the host, before it runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.row_checks import check_rows
from tests.pallas_kernels.ragged_cases import array_args, make_case, make_pages

NAMES = ("kv_lens", "page_table", "kv_starts", "cu_q_lens", "ranges")
LIMITS = {"num_tokens": 8, "num_pages": 9, "page_size": 4}
# Rows: 1 token of 6, 3 tokens of 9, padding; two and three pages, of three a row.
GOOD = {
    "kv_lens": [6, 9, 0],
    "page_table": [1, 2, 0, 3, 4, 5, 0, 0, 0],
    "kv_starts": [0, 0, 0],
    "cu_q_lens": [0, 1, 4, 4],
    "ranges": [1, 1, 2],
}


def check(**changes) -> None:
    rows = {name: np.array(value, np.int32) for name, value in (GOOD | changes).items()}
    check_rows(**rows, **LIMITS)


def test_a_sound_batch_passes():
    check()
    check(kv_lens=[16, 9, 0], kv_starts=[12, 0, 0])  # the first three pages of row 0 are freed
    check(page_table=[0, 2, 0, 3, 4, 5, 0, 0, 0])  # so is one before a window
    check(page_table=[3, 2, 0, 3, 4, 5, 0, 0, 0])  # a shared page that nobody writes
    empty = {name: [0, 0, 0] for name in ("kv_lens", "kv_starts", "ranges")}
    check(**empty, cu_q_lens=[0, 0, 0, 0], page_table=[0] * 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_table": [1, 9, 0, 3, 4, 5, 0, 0, 0]}, r"row 0, entry 1 is page 9.*\[0, 9\)"),
        ({"page_table": [1, 2, 0, 3, 4, -5, 0, 0, 0]}, r"row 1, entry 2 is page -5"),
        ({"page_table": [1, 2, 0, 3, 4, 5, 0, 77, 0]}, r"row 2, entry 1 is page 77"),
        ({"page_table": [1, 0, 0, 3, 4, 5, 0, 0, 0]}, r"row 0.*\[0\], and page 0 is the null page"),
        ({"page_table": [1, 4, 0, 3, 4, 5, 0, 0, 0]}, r"rows 0 and 1: both write.* page 4"),
        ({"kv_lens": [13, 9, 0]}, r"kv_lens\[0\]=13: .*at most 12"),
        ({"kv_lens": [6, 2, 0]}, r"kv_lens\[1\]=2: .*at least its 3 new tokens"),
        ({"kv_lens": [2**31 - 1, 9, 0]}, r"kv_lens\[0\]=2147483647"),
        ({"kv_starts": [2, 0, 0]}, r"kv_starts\[0\]=2: .*begins a page of 4"),
        ({"kv_starts": [-4, 0, 0]}, r"kv_starts\[0\]=-4"),
        ({"cu_q_lens": [0, 1, 9, 9]}, r"cu_q_lens=\[0, 1, 9, 9\]: .*at most 8"),
        ({"cu_q_lens": [0, 4, 1, 4]}, r"cu_q_lens=\[0, 4, 1, 4\]"),
        ({"cu_q_lens": [1, 2, 4, 4]}, r"cu_q_lens=\[1, 2, 4, 4\]"),
        ({"ranges": [1, 1, 4]}, r"ranges=\[1, 1, 4\]: .*at most 3 rows"),
        ({"ranges": [2, 2, 2]}, r"ranges=\[2, 2, 2\]: the rows have \[1, 3, 0\] tokens"),
        ({"ranges": [1, 1, 1]}, r"ranges=\[1, 1, 1\]: .*those from 1 on none"),
        ({"ranges": [1, 0, 2]}, r"ranges=\[1, 0, 2\]"),
        ({"ranges": [0, 0, 2]}, r"ranges=\[0, 0, 2\]: .*one must be among the first 0"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        check(**changes)


def attend(page_table=None, *, jit, debug=True):
    case = make_case([(1, 6), (3, 9)], page=4)
    args = array_args(case)
    if page_table is not None:
        args["page_table"] = jnp.asarray(page_table, jnp.int32)
    f = functools.partial(ragged_paged_attention, sm_scale=0.2, backend="xla", debug=debug)
    call = jax.jit(f) if jit else f
    return np.asarray(call(jnp.asarray(case.q), kv=make_pages(case, "xla"), **args)[0])


def test_the_entry_looks_in_debug_mode_alone():
    bad = [1, 99, 0, 3, 4, 5]
    with pytest.raises(ValueError, match="page 99"):
        attend(bad, jit=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="row 0, entry 1 is page 99"):
        attend(bad, jit=True)
    np.testing.assert_array_equal(attend(jit=True), attend(jit=True, debug=False))
