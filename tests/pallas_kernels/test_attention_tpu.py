"""tpu.py: what its interpreter catches, what it refuses, what fits.

Right results are in test_attention.py; what the TPU compiler makes of it is in
test_attention_tpu_aot.py. The interpreter checks waits, bounds and races, but a head's keys and
values are loaded in another form there than in the compiled kernel:
`test_the_loads_of_the_compiled_and_the_interpreted_kernel` runs both.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.ragged_paged_attention import (
    KVPages,
    layout,
    ragged_paged_attention,
    tpu,
    tpu_kernel,
)
from tests.pallas_kernels import tpu_interpreted
from tests.pallas_kernels.child import faults
from tests.pallas_kernels.ragged_cases import array_args, make_case, make_pages

F32 = jnp.float32


@pytest.fixture(scope="module")
def broken() -> dict[str, str]:
    return faults(tpu_interpreted.__name__, limit_s=120)


@pytest.mark.interpret
@pytest.mark.parametrize("name", tpu_interpreted.BROKEN)
def test_a_broken_kernel_is_caught(name, broken):
    assert broken["sound"] == broken["sound, eager"] == ""
    assert broken.get(name, "hung") != ""
    if name in tpu_interpreted.RACES:
        assert broken[name].startswith("race")


def plan_of(head_dim=64, kv_dtype="bfloat16", *, heads=(9, 3), dtype="bfloat16", **options):
    q = jax.ShapeDtypeStruct((64, heads[0], head_dim), jnp.dtype(dtype))
    kv = KVPages.abstract("tpu", 8, options.pop("page", 16), heads[1], head_dim, kv_dtype)
    defaults = {
        "num_rows": 4,
        "num_entries": 64,
        "window": None,
        "soft_cap": None,
        "has_sinks": False,
        "return_lse": False,
        "writes": True,
        "interpreted": False,
    }
    return tpu.make_plan(q, kv, **defaults | options)


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"),
    [
        (64, "bfloat16"),
        (128, "float32"),
        (64, "int8"),
        (128, "float8_e4m3fn"),
        (256, "float8_e5m2"),
    ],
)
def test_the_loads_of_the_compiled_and_the_interpreted_kernel(head_dim, kv_dtype, interpreted):
    """Both give each head its keys and values; the DMAs around them are not part of it."""
    rng = np.random.default_rng(0)
    pair = rng.integers(-8, 8, (2, 16, 3, head_dim)).astype(np.float32)  # exact in every dtype
    k, v = (jnp.asarray(x).astype(kv_dtype) for x in pair)
    plan = plan_of(head_dim, kv_dtype, blocks=(1, 4), interpreted=interpreted)
    half = layout.pack_tpu_rows(k, v)  # [block, words, pack, 128]
    buf = jnp.stack([jnp.zeros_like(half), half])

    def body(buf_ref, keys_ref, values_ref):
        fields = dict.fromkeys(tpu_kernel.Refs.__dataclass_fields__) | {"kv_buf": buf_ref}
        kernel = tpu_kernel._Kernel(tpu_kernel.Refs(**fields), plan)
        for head in range(3):
            keys, values = kernel.keys_and_values(functools.partial(kernel.load_word, 1), head)
            keys_ref[head], values_ref[head] = keys.astype(F32), values.astype(F32)

    shape = jax.ShapeDtypeStruct((3, 16, plan.width), F32)
    keys, values = compat.pallas_call(body, out_shape=[shape, shape], interpret=True)(buf)
    for got, want, lanes in (
        (keys, pair[0], slice(head_dim)),
        (values, pair[1], slice(-head_dim, None)),
    ):
        got = np.asarray(got)[:, :, lanes]
        np.testing.assert_array_equal(got.transpose(1, 0, 2), want)


def call(case, **options):
    """Traces a call; nothing runs."""
    kv = options.pop("kv", None) or make_pages(case, "tpu")
    f = functools.partial(ragged_paged_attention, sm_scale=0.2, backend="tpu", **options)
    return jax.eval_shape(f, jnp.asarray(case.q), kv=kv, **array_args(case))


def test_what_is_not_served_is_refused_by_name():
    case = make_case([(1, 3)], head_dim=64)
    with pytest.raises(NotImplementedError, match="layout=split"):
        call(case, kv=make_pages(case, "xla"))
    with pytest.raises(ValueError, match="head_dim=32"):
        make_pages(make_case([(1, 3)]), "tpu")
    half = make_case([(1, 3)], head_dim=64, kv_dtype="float16")
    with pytest.raises(NotImplementedError, match="kv_cache_dtype=float16"):
        call(half)
    with pytest.raises(ValueError, match="interpret='yes'"):
        call(case, interpret="yes")
    for blocks in ((4,), (0, 4), (4, 1.5)):
        with pytest.raises(ValueError, match="blocks="):
            call(case, blocks=blocks)
    assert call(case)[0].shape == case.q.shape  # the control: all is well without them


def test_a_page_table_beyond_smem_is_refused_with_the_sizes():
    message = r"page_table: 256 rows of 1024 pages take 10516\d\d bytes of SMEM.* has 983040"
    with pytest.raises(ValueError, match=message):
        plan_of(num_rows=256, num_entries=256 * 1024)
    plan_of(num_rows=256, num_entries=256 * 950)


def test_blocks_beyond_vmem_are_refused_with_the_sizes():
    message = (
        r"blocks: 64 pages of 64 tokens and tiles of 128 .*3 KV heads take \d+ bytes.* 33554432"
    )
    with pytest.raises(ValueError, match=message):
        plan_of(page=64, num_entries=4096, blocks=(64, 128))
    assert plan_of(page=64, num_entries=4096, blocks=(8, 128)).block_tokens == 512


@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (32, 32), (32, 1), (128, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_our_blocks_leave_vmem_half_empty(heads, dtype, head_dim):
    plan = plan_of(head_dim, dtype, heads=heads, dtype=dtype, num_entries=4096)
    assert 64 <= plan.block_tokens <= 512
    assert plan.tile_tokens >= 4
    assert 2 * tpu.vmem_bytes(plan) <= tpu.VMEM_LIMIT_BYTES or plan.tile_tokens == 1


def test_sinks_count_against_vmem():
    plan = dataclasses.replace(plan_of(heads=(32, 8)), has_sinks=False)
    more = tpu.vmem_bytes(dataclasses.replace(plan, has_sinks=True)) - tpu.vmem_bytes(plan)
    assert more == 2 * 8 * 4 * 128 * 4  # 8 KV heads of 4 query heads, 128 lanes of f32


def test_f32_products_ask_for_full_precision():
    """bf16 products do not: the control."""
    for dtype, expected in (("float32", True), ("bfloat16", False)):
        case = make_case([(1, 3), (4, 9)], head_dim=64, dtype=dtype)
        f = functools.partial(ragged_paged_attention, sm_scale=0.2, backend="tpu")
        args = array_args(case)
        text = str(jax.make_jaxpr(f)(jnp.asarray(case.q), kv=make_pages(case, "tpu"), **args))
        assert text.count("dot_general") == 8  # two tile sizes, two heads, scores and values
        assert text.count("Precision.HIGHEST, Precision.HIGHEST") == (8 if expected else 0)


def test_many_layers_are_traced_once():
    case = make_case([(1, 3), (4, 9)], head_dim=64)
    args = array_args(case)

    def layers(q, pools):
        for kv in pools:
            q, _, _ = ragged_paged_attention(q, kv=kv, **args, sm_scale=0.2, backend="tpu")
        return q

    jaxpr = jax.make_jaxpr(layers)(jnp.asarray(case.q), [make_pages(case, "tpu")] * 2)
    calls = [eqn for eqn in jaxpr.eqns if eqn.params.get("name") == "_attend"]
    assert len(calls) == 2
    assert calls[0].params["jaxpr"] is calls[1].params["jaxpr"]
