"""gpu_chunks.py: the kernel in Pallas' interpreter against a float64 softmax, its work list, its plans.

The interpreter checks waits and races, but not those of wgmma, and takes forms that the compiler for
sm_90a does not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention import gpu_chunks, gpu_plan
from tests.pallas_kernels import gpu_chunks_interpreted
from tests.pallas_kernels.child import faults


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return faults(gpu_chunks_interpreted.__name__, "cases", limit_s=240)


@pytest.fixture(scope="module")
def broken() -> dict[str, str]:
    return faults(gpu_chunks_interpreted.__name__, "controls", limit_s=120)


@pytest.mark.gpu_interpret
@pytest.mark.parametrize("name", gpu_chunks_interpreted.CASES)
def test_the_interpreted_kernel_is_right_and_has_no_race(name, interpreted):
    assert interpreted.get(name, "hung, or the child died") == ""


@pytest.mark.gpu_interpret
@pytest.mark.parametrize("name", gpu_chunks_interpreted.BROKEN)
def test_a_broken_kernel_is_caught(name, broken):
    assert broken["sound"] == ""
    assert broken.get(name, "hung") != ""
    assert gpu_chunks_interpreted.BROKEN[name][2] in broken.get(name, "hung")


def plan_of(heads=(4, 1), head_dim=64, num_tokens=300, num_rows=5, kv_dtype="bfloat16"):
    q = jax.ShapeDtypeStruct((num_tokens, heads[0], head_dim), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((8, heads[1], 2, 64, head_dim), jnp.dtype(kv_dtype))
    options = {"window": None, "soft_cap": None, "has_sinks": True, "interpreted": False}
    return gpu_chunks.make_plan(q, pool, num_rows, **options)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (15, 5), (6, 1), (32, 4), (32, 1), (71, 1)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_work_list_holds_every_token_once(heads, head_dim):
    """Tiles begin at whole blocks of 8 query rows, stay within their row, and none overlap."""
    counts, lens = np.array([1, 7, 0, 130, 150, 0], np.int32), np.array([9, 7, 5, 200, 151, 0])
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    plan = plan_of(heads, head_dim, num_tokens=300, num_rows=6)
    ranges = jnp.array([1, 1, 5], jnp.int32)
    work = gpu_chunks._make_work(
        plan, 300, jnp.asarray(lens.astype(np.int32)), jnp.asarray(cu), ranges
    )
    work = jax.tree.map(np.asarray, work)
    seen, places = [], set()
    for index, (row, first, count, position) in enumerate(work.tiles[: work.num_tiles[0]]):
        assert first % 8 == 0
        assert 0 < count * plan.token_rows <= plan.tile_rows
        begin = cu[row] + position - (lens[row] - counts[row])
        tokens = range(begin, begin + count)
        assert tokens.stop <= cu[row + 1]
        for i, token in enumerate(tokens):
            place = first // plan.token_rows + i
            assert work.source[place] == token
            assert work.target[token] == place
            assert work.tile[token] == index
            assert work.tile_row[token] == i * plan.token_rows
        seen += tokens
        blocks = set(range(first // 8, -(-(first + count * plan.token_rows) // 8)))
        assert not blocks & places
        places |= blocks
    assert sorted(seen) == list(range(cu[1], cu[5]))


def test_the_bound_on_tiles_holds_at_its_worst():
    """Every row one token beyond whole tiles; and none where there are more rows than tokens."""
    plan = plan_of((4, 1), num_tokens=33 * 4, num_rows=4)
    assert plan.tile_tokens == 32
    assert plan.num_tiles == 8
    assert plan_of((4, 1), num_tokens=2, num_rows=256).num_tiles == 2


@pytest.mark.parametrize(
    ("group", "head_dim", "cut"),
    [
        (1, 64, (1, 1, 128)),
        (3, 64, (1, 3, 40)),
        (15, 64, (1, 15, 8)),
        (17, 64, (1, 24, 5)),  # 8 tokens, the fewest that are whole blocks of 8 rows, do not fit
        (71, 64, (1, 72, 1)),
        (130, 64, (2, 72, 1)),  # 65 in each, and padding
        (8, 256, (1, 8, 8)),
        (9, 256, (1, 16, 4)),
        (71, 256, (2, 40, 1)),
    ],
)
def test_heads_that_do_not_fit_a_tile_are_padded_or_take_passes(group, head_dim, cut):
    plan = plan_of((2 * group, 2), head_dim)
    assert (plan.passes, plan.token_rows, plan.tile_tokens) == cut
    assert plan.heads == 2 * plan.passes


def test_splitting_and_joining_heads_keeps_them():
    plan = plan_of((142, 2), 256)
    q = jnp.arange(3 * 142 * 256, dtype=jnp.int32).reshape(3, 142, 256)
    split = gpu_chunks._split(plan, q)
    assert split.shape == (3, 4, 40, 256)
    np.testing.assert_array_equal(split[:, 2, 1], q[:, 72])  # the second KV head, its second head
    np.testing.assert_array_equal(gpu_chunks._join(plan, split), q)


@pytest.mark.parametrize("head_dim", dispatch.BACKENDS["gpu"].head_dims)
@pytest.mark.parametrize("kv_dtype", dispatch.BACKENDS["gpu"].kv_dtypes)
def test_every_plan_fits_in_shared_memory(head_dim, kv_dtype):
    plan = plan_of(head_dim=head_dim, kv_dtype=kv_dtype)
    assert plan.num_landing >= 2  # one is loaded while another is read
    buffers = gpu_chunks._scratch(plan).values()
    buffers = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in buffers if hasattr(x, "dtype")]
    taken = sum(x.size * x.dtype.itemsize for x in buffers) + gpu_plan.REDUCTION_BYTES
    assert 2**16 < taken <= gpu_plan.SMEM_BYTES_PER_CTA - 1024  # barriers, and what aligns them
