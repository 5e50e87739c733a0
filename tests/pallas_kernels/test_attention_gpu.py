"""gpu.py: its kernels by themselves in Pallas' interpreter, the work list, what it refuses.

The backend as a whole is in test_attention.py; what the compiler for Hopper makes of it is in
test_attention_gpu_aot.py. The interpreter checks barriers and races of copies; it does not see a race
of wgmma, a page id out of range or a cast that the hardware lacks.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, dispatch
from pallas_kernels.ragged_paged_attention import (
    KVPages,
    gpu,
    gpu_blocks,
    gpu_plan,
    ragged_paged_attention,
)
from tests.pallas_kernels import gpu_interpreted
from tests.pallas_kernels.child import faults
from tests.pallas_kernels.ragged_cases import array_args, make_case, make_pages


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return faults(gpu_interpreted.__name__, "cases", limit_s=420)


@pytest.fixture(scope="module")
def broken() -> dict[str, str]:
    return faults(gpu_interpreted.__name__, "controls", limit_s=150)


@pytest.mark.gpu_interpret
@pytest.mark.timeout(450)
@pytest.mark.parametrize("name", gpu_interpreted.CHECKS)
def test_the_interpreted_kernels_are_right_and_have_no_race(name, interpreted):
    assert interpreted.get(name, "hung, or the child died") == ""


@pytest.mark.gpu_interpret
@pytest.mark.parametrize("name", gpu_interpreted.BROKEN)
def test_a_broken_kernel_is_caught(name, broken):
    assert broken["sound"] == ""
    assert broken.get(name, "hung") != ""
    if name in gpu_interpreted.RACES:
        assert broken[name].startswith("race")


def plan_of(head_dim=64, kv_dtype="bfloat16", *, heads=(9, 3), **options) -> gpu_plan.DecodePlan:
    q = jax.ShapeDtypeStruct((4, heads[0], head_dim), jnp.bfloat16)
    kv = KVPages.abstract("head_major", 8, 64, heads[1], head_dim, kv_dtype)
    return gpu.make_plan(q, kv, **options)


@pytest.mark.parametrize("head_dim", dispatch.BACKENDS["gpu"].head_dims)
@pytest.mark.parametrize("kv_dtype", dispatch.BACKENDS["gpu"].kv_dtypes)
@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (32, 32), (64, 4), (32, 1), (128, 1)])
def test_every_plan_fits(head_dim, kv_dtype, heads):
    plan = plan_of(head_dim, kv_dtype, heads=heads)
    assert plan.columns * plan.passes >= plan.group
    assert plan.stages >= 2  # one is loaded while another is read
    taken = gpu_plan.smem_bytes(plan, plan.stages)
    assert taken <= 227 * 1024
    assert plan.ctas_per_multiprocessor * (taken + 1024) <= 228 * 1024


def test_two_ctas_of_common_models_share_a_multiprocessor_with_three_pages_on_their_way():
    for head_dim in (64, 128):
        plan = plan_of(head_dim, heads=(32, 8))
        assert (plan.ctas_per_multiprocessor, plan.stages, plan.num_ctas) == (2, 3, 264)
    plan = plan_of(256, heads=(32, 8))
    assert (plan.ctas_per_multiprocessor, plan.stages, plan.num_ctas) == (1, 3, 132)


def work_of(plan, lens, starts, num_live, pages_per_row):
    """[(first page, end page) of each row's items], in absolute pages."""
    work = gpu_plan.work_list(
        plan, jnp.asarray(lens, jnp.int32), jnp.asarray(starts, jnp.int32), num_live, pages_per_row
    )
    items, bounds = np.asarray(work.items), np.asarray(work.row_items)
    assert bounds[-1] <= items.shape[1]
    found = []
    for r, (length, start) in enumerate(zip(lens, starts, strict=True)):
        item = gpu_plan.Item(*items[:, bounds[r] : bounds[r + 1]])
        begin = start if plan.window is None else max(start, length - plan.window)
        assert (item.row == r).all()
        assert (item.first_slot == begin - start).all()
        assert (item.end_slot == length - start).all()
        offset = start // 64
        found.append(list(zip(item.first_page + offset, item.end_page + offset, strict=True)))
    return found


@pytest.mark.parametrize("window", [None, 1, 100, 5000])
@pytest.mark.parametrize("split_pages", [1, 8])
def test_splits_are_the_pages_that_a_row_sees_cut_at_absolute_positions(window, split_pages):
    rng = np.random.default_rng(0)
    plan = plan_of(window=window, blocks=(split_pages,))
    starts = rng.integers(0, 300, 40) * 64
    lens = starts + rng.integers(1, 700 * 64, 40)
    lens[:4] = np.add(starts[:4], [1, 64, 65, 700 * 64])
    splits = work_of(plan, lens, starts, 38, 700)
    assert splits[38:] == [[], []]
    for row, length, start in zip(splits[:38], lens, starts, strict=False):
        begin = start if window is None else max(start, length - window)
        firsts, ends = zip(*row, strict=True)
        assert (firsts[0], ends[-1]) == (begin // 64, (length + 63) // 64)
        assert firsts[1:] == ends[:-1]
        assert all(first < end for first, end in row)
        size = split_pages
        while length - begin > gpu_plan.MAX_SPLITS * size * 64:
            size *= 2
        assert all(first % size == 0 for first in firsts[1:])
        assert len(row) <= gpu_plan.MAX_SPLITS + 1
    # A property of the row alone, whatever the neighbours and the table.
    for r in (3, 20):
        alone = work_of(plan, lens[r : r + 1], starts[r : r + 1], 1, 2000)
        assert alone == [splits[r]]


def test_partials_stop_growing():
    plan = plan_of(128, heads=(64, 8))
    assert gpu_plan.partial_bytes(plan, 256, 128) == 144_834_560
    assert gpu_plan.partial_bytes(plan, 256, 2048) == 281_149_440
    assert gpu_plan.partial_bytes(plan, 256, 4096) == 281_149_440
    narrow = plan_of(128, heads=(64, 8), window=512)
    assert gpu_plan.partial_bytes(narrow, 256, 4096) == 256 * 2 * 8 * 8 * 130 * 4


def call(case, **options):
    """Traces a call; nothing runs."""
    kv = options.pop("kv", None) or make_pages(case, "gpu")
    f = functools.partial(ragged_paged_attention, sm_scale=0.2, backend="gpu", **options)
    return jax.eval_shape(f, jnp.asarray(case.q), kv=kv, **array_args(case))


def test_what_is_not_served_is_refused_by_name():
    make = functools.partial(make_case, [(1, 3)], page=64, head_dim=64, dtype="bfloat16")
    case = make()
    with pytest.raises(NotImplementedError, match="layout=split"):
        call(case, kv=make_pages(case, "xla"))
    for change, message in (
        ({"dtype": "float32"}, "dtype=float32: attention backend 'gpu' serves bfloat16"),
        ({"head_dim": 96}, "head_dim=96: .*'gpu' serves 64, 128, 256"),
        ({"kv_dtype": "float32"}, "kv_cache_dtype=float32: .*serves bfloat16, int8"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call(make(**change))
    with pytest.raises(ValueError, match="page_size=32: attention backend 'gpu' serves 64 only"):
        call(make(page=32))
    with pytest.raises(ValueError, match="interpret='yes'"):
        call(case, interpret="yes")
    for blocks in ((), (0,), (4, 4), (1.5,)):
        with pytest.raises(ValueError, match="blocks="):
            call(case, blocks=blocks)
    assert call(case)[0].shape == case.q.shape  # the control: all is well without them


def test_many_layers_are_traced_once():
    case = make_case([(1, 3)], page=64, head_dim=64, dtype="bfloat16")
    args = array_args(case)

    def layers(q, pools):
        for kv in pools:
            q, _, _ = ragged_paged_attention(q, kv=kv, **args, sm_scale=0.2, backend="gpu")
        return q

    jaxpr = jax.make_jaxpr(layers)(jnp.asarray(case.q), [make_pages(case, "gpu")] * 2)
    calls = [eqn for eqn in jaxpr.eqns if eqn.params.get("name") == "_attend"]
    assert len(calls) == 2
    assert calls[0].params["jaxpr"] is calls[1].params["jaxpr"]


@pytest.mark.parametrize(
    ("heads", "head_dim", "kv_dtype"),
    [
        ((4, 1), 64, None),
        ((64, 2), 128, None),
        ((4, 1), 64, "int8"),
        ((9, 1), 256, "float8_e4m3fn"),
    ],
)
def test_tiled_copies_keep_to_aligned_shared_memory(heads, head_dim, kv_dtype, monkeypatch):
    """The hardware wants a tiled copy's shared memory at a multiple of 128 bytes.

    Neither the interpreter nor the compiler looks: on a device it is a fault. A buffer begins at a
    multiple of 1024; a part of one is where whole parts of its size come before it.
    """
    parts = []

    def record(copy, which):
        def recorded(*refs, **options):
            ref = refs[which]
            if hasattr(ref, "transforms") and "oob_mode" not in options:
                parts.append(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize)
            return copy(*refs, **options)

        return recorded

    for name, which in (("copy_gmem_to_smem", 1), ("copy_smem_to_gmem", 0)):
        monkeypatch.setattr(compat, name, record(getattr(compat, name), which))
    jax.clear_caches()  # traces that other tests have left
    call(
        make_case(
            [(1, 70), (3, 66)],
            page=64,
            heads=heads,
            head_dim=head_dim,
            dtype="bfloat16",
            kv_dtype=kv_dtype,
        ),
        return_lse=True,
    )
    jax.clear_caches()
    assert len(parts) > 5
    assert [size for size in parts if size % 128] == []


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.1, 1.0, 5.0, 40.0, 1e4])
def test_tanh_is_precise_whatever_the_hardware_has(size):
    x = jnp.array([-size, size], jnp.float32)
    np.testing.assert_allclose(gpu_blocks.tanh(x), np.tanh(np.float64(x)), atol=3e-7)


def test_the_plan_can_be_a_static_argument():
    plan = plan_of()
    assert hash(plan) == hash(plan_of())
    assert plan != dataclasses.replace(plan, window=3)
