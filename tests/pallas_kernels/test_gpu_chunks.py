"""gpu_chunks.py: the kernel in Pallas' interpreter against a float64 softmax, its work list, what it refuses.

The interpreter checks waits and races, but not those of wgmma, and takes forms that the compiler for
sm_90a does not.
"""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import gpu_chunks
from tests.pallas_kernels import gpu_chunks_interpreted


def interpret(which: str, repository, timeout_s: float) -> dict[str, str]:
    """Name -> fault of what the child reported before it ended or its time was up."""
    command = [sys.executable, "-m", "tests.pallas_kernels.gpu_chunks_interpreted", which]
    with subprocess.Popen(
        command, cwd=repository, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        try:
            output, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
    # jax 0.11 prints the races it finds among them.
    results = [json.loads(line) for line in output.splitlines() if line.startswith('{"name"')]
    return {result["name"]: result["fault"] for result in results}


@pytest.fixture(scope="module")
def interpreted(repository) -> dict[str, str]:
    return interpret("cases", repository, timeout_s=240)


@pytest.fixture(scope="module")
def broken(repository) -> dict[str, str]:
    return interpret("controls", repository, timeout_s=120)


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
    return gpu_chunks.make_plan(q, pool, num_rows, None, None, False)


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (15, 5), (6, 1), (32, 4), (32, 1)])
def test_the_work_list_holds_every_token_once(heads):
    """Tiles begin at whole blocks of 8 query rows, stay within their row, and none overlap."""
    counts, lens = np.array([1, 7, 0, 130, 150, 0], np.int32), np.array([9, 7, 5, 200, 151, 0])
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    plan = plan_of(heads, num_tokens=300, num_rows=6)
    ranges = jnp.array([1, 1, 5], jnp.int32)
    work = gpu_chunks._make_work(
        plan, 300, jnp.asarray(lens.astype(np.int32)), jnp.asarray(cu), ranges
    )
    work = jax.tree.map(np.asarray, work)
    seen, places = [], set()
    for index, (row, first, count, position) in enumerate(work.tiles[: work.num_tiles[0]]):
        assert first % 8 == 0
        assert 0 < count * plan.group <= gpu_chunks.TILE_ROWS
        begin = cu[row] + position - (lens[row] - counts[row])
        tokens = range(begin, begin + count)
        assert tokens.stop <= cu[row + 1]
        for i, token in enumerate(tokens):
            place = first // plan.group + i
            assert work.source[place] == token
            assert work.target[token] == place
            assert work.tile[token] == index
            assert work.tile_row[token] == i * plan.group
        seen += tokens
        blocks = set(range(first // 8, -(-(first + count * plan.group) // 8)))
        assert not blocks & places
        places |= blocks
    assert sorted(seen) == list(range(cu[1], cu[5]))


def test_the_bound_on_tiles_holds_at_its_worst():
    """Every row one token beyond whole tiles; and none where there are more rows than tokens."""
    plan = plan_of((4, 1), num_tokens=33 * 4, num_rows=4)
    assert plan.tile_tokens == 32
    assert plan.num_tiles == 8
    assert plan_of((4, 1), num_tokens=2, num_rows=256).num_tiles == 2


def call(head_dim=64, page=64, dtype="bfloat16", kv_dtype="bfloat16", heads=(4, 2)):
    """Traces a call; nothing runs."""
    ints = [(2,), (2, 4), (2,), (3,), (3,)]  # lengths, table, starts, cumulative, ranges
    shapes = (
        jax.ShapeDtypeStruct((8, heads[0], head_dim), jnp.dtype(dtype)),
        jax.ShapeDtypeStruct((8, heads[1], 2, page, head_dim), jnp.dtype(kv_dtype)),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ints),
        *[None] * 3,  # scales and sinks
    )
    options = {"sm_scale": 0.2, "window": None, "soft_cap": None, "interpret": None}
    return jax.eval_shape(functools.partial(gpu_chunks.attend_chunks, **options), *shapes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 256}, "head_dim=256"),
        ({"head_dim": 96}, "head_dim=96"),
        ({"page": 32}, "page_size=32"),
        ({"dtype": "float32"}, "q: float32"),
        ({"kv_dtype": "float16"}, "kv dtype float16"),
        ({"heads": (71, 1)}, "71 heads a KV head"),
    ],
)
def test_what_is_not_served_is_refused_by_name(arguments, message):
    with pytest.raises(NotImplementedError, match=message):
        call(**arguments)
    out, lse = call()  # the control
    assert (out.shape, lse.shape) == ((8, 4, 64), (8, 4))
