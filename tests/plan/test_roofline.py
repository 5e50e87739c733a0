"""The roofline against numbers worked out by hand."""

from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.plan.chips import CHIPS, ChipSpec
from jaxserve.plan.models import MODELS, ModelSpec
from jaxserve.plan.roofline import Roofline, num_pairs

LLAMA = MODELS["llama-3-8b"]
# Easy to work with: 1 FLOP/s, 1 byte/s; a model of 1 layer, E = 4, F = 8, H = 2, K = 1, D = 2, V = 10.
UNIT = ChipSpec(
    peak_flops_per_s=1.0,
    hbm_bytes_per_s=1.0,
    hbm_bytes=10_000,
    host_bytes_per_s=1.0,
    link_bytes_per_s=1.0,
    peak_f32_flops_per_s=0.25,
    platform="cpu",
)
TINY = ModelSpec(
    vocab_size=10,
    hidden_size=4,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    max_position_embeddings=64,
)
LAYER_PARAMS = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8  # q, k and v, o, mlp = 144
KV_BYTES = 2 * 1 * 2 * 2  # of a token


def chip(**changes: Any) -> ChipSpec:
    values = {name: getattr(UNIT, name) for name in UNIT.__dataclass_fields__}
    return ChipSpec(**(values | changes))


def test_pairs_of_a_causal_slice():
    assert num_pairs(0, 1) == 1
    assert num_pairs(10, 1) == 11
    assert num_pairs(2, 3) == 3 + 4 + 5


def test_compute_of_a_step():
    fast_memory = chip(hbm_bytes_per_s=1e12)
    step = Roofline(TINY, fast_memory, overhead_s=0.0).step_s(
        num_tokens=3, num_logit_rows=1, num_context_tokens=5, num_pairs=12
    )
    # two operations a parameter and token; the head for one row; 4 * L * H * D a pair
    assert step == pytest.approx(2 * LAYER_PARAMS * 3 + 2 * 40 + 4 * 4 * 12)


def test_memory_of_a_step():
    fast_chip = chip(peak_flops_per_s=1e12)
    roofline = Roofline(TINY, fast_chip, overhead_s=0.25)
    sums = {"num_tokens": 3, "num_context_tokens": 5, "num_pairs": 12}
    weights, pages = 2 * LAYER_PARAMS, KV_BYTES * (5 + 3)
    assert roofline.step_s(num_logit_rows=0, **sums) == pytest.approx(weights + pages + 0.25)
    assert roofline.step_s(num_logit_rows=2, **sums) == pytest.approx(weights + 80 + pages + 0.25)


def test_two_chips_halve_the_work_but_for_the_kv_head_and_talk_twice_a_layer():
    fast_memory = chip(hbm_bytes_per_s=1e12)
    two = Roofline(TINY, fast_memory, num_chips=2, overhead_s=0.0)
    # each has half of q, o and the MLP, and all of the one KV head
    compute = 2 * (64 + 16) * 3 + 4 * 4 * 12 / 2
    # two all-reduces of 3 tokens * 4 elements * 2 bytes, each sending 2 * (2 - 1) / 2 of that
    talk = 2 * (3 * 4 * 2) * 1
    step = two.step_s(num_tokens=3, num_logit_rows=0, num_context_tokens=5, num_pairs=12)
    assert step == pytest.approx(compute + talk)


def test_kv_heads_are_repeated_where_there_are_more_chips():
    one, two = (Roofline(TINY, UNIT, num_chips=n) for n in (1, 2))
    assert one.page_bytes(16) == two.page_bytes(16) == 16 * KV_BYTES  # K = 1 on both chips
    eight = Roofline(LLAMA, CHIPS["h100"], num_chips=8)
    assert eight.page_bytes(16) == 131072 * 16 // 8


def test_a_slice_is_a_step_of_one_row():
    roofline = Roofline(LLAMA, CHIPS["v5e"])
    assert roofline.slice_s(100, 28) == roofline.step_s(
        num_tokens=28, num_logit_rows=1, num_context_tokens=128, num_pairs=100 * 28 + 28 * 29 // 2
    )


def test_moves_and_copies_of_a_page():
    roofline = Roofline(LLAMA, CHIPS["h100"])
    assert roofline.page_move_s(16) == pytest.approx(131072 * 16 / 64e9)
    assert roofline.page_copy_s(16) == pytest.approx(2 * 131072 * 16 / 3350e9)


def test_pages_that_fit():
    # 0.9 * 80 GB - 16.06 GB of weights, in pages of 2 MiB
    h100 = Roofline(LLAMA, CHIPS["h100"])
    assert h100.weight_bytes == 2 * 8_030_261_248
    assert h100.num_pages_that_fit(16) == (72_000_000_000 - 16_060_522_496) // 2_097_152
    assert h100.num_pages_that_fit(16, 0.5) < h100.num_pages_that_fit(16)


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"1 chips of 16 GB hold no page .* 16.06 GB of weights"):
        Roofline(LLAMA, CHIPS["v5e"]).num_pages_that_fit(16)


@pytest.mark.parametrize(
    ("num_chips", "message"),
    [
        (0, "num_chips must be at least 1, got 0"),
        (-1, "num_chips must be at least 1, got -1"),
        (3, "num_chips must divide the model's 32 query heads, got 3"),
        (64, "num_chips must divide the model's 32 query heads, got 64"),
    ],
)
def test_chips_that_do_not_divide_the_heads_are_refused(num_chips, message):
    with pytest.raises(ConfigError, match=message):
        Roofline(LLAMA, CHIPS["h100"], num_chips=num_chips)


@pytest.mark.parametrize("name", CHIPS)
def test_a_decode_step_is_bound_by_memory_and_a_chunk_by_arithmetic(name):
    spec = CHIPS[name]
    roofline = Roofline(LLAMA, spec)
    decode = roofline.slice_s(0, 1) - roofline.overhead_s
    read = LLAMA.num_layer_matmul_params + LLAMA.num_head_params
    assert decode == pytest.approx(2 * read / spec.hbm_bytes_per_s, rel=1e-4)
    chunk = roofline.slice_s(0, 2048) - roofline.overhead_s
    least = 2 * LLAMA.num_layer_matmul_params * 2048 / spec.peak_flops_per_s
    assert least < chunk < 1.1 * least


def test_float32_and_8_bit_pages_change_bytes_and_peak():
    plain = Roofline(TINY, UNIT, overhead_s=0.0)
    full = Roofline(TINY, UNIT, dtype="float32", kv_cache_dtype="int8", overhead_s=0.0)
    assert full.weight_bytes == 2 * plain.weight_bytes
    assert full.page_bytes(16) == plain.page_bytes(16) // 2
    sums = {"num_tokens": 3, "num_logit_rows": 1, "num_context_tokens": 5, "num_pairs": 12}
    slow, fast = full.step_time(**sums), plain.step_time(**sums)
    assert slow.compute_s == 4 * fast.compute_s  # a quarter of the peak
    assert slow.weights_s == 2 * fast.weights_s
    assert slow.kv_s == fast.kv_s / 2


def test_the_parts_of_a_step_make_its_time():
    slow_memory = Roofline(TINY, chip(peak_flops_per_s=1e12), overhead_s=0.25)
    sums = {"num_tokens": 3, "num_logit_rows": 0, "num_context_tokens": 5, "num_pairs": 12}
    time = slow_memory.step_time(**sums)
    assert (time.weights_s, time.kv_s) == pytest.approx((2 * LAYER_PARAMS, KV_BYTES * 8))
    assert time.bound_by == "weights"
    assert time.step_s == pytest.approx(time.weights_s + time.kv_s + time.links_s + 0.25)
    assert slow_memory.step_time(**sums | {"num_context_tokens": 10**4}).bound_by == "kv"
    slow_chip = Roofline(TINY, chip(hbm_bytes_per_s=1e12), overhead_s=0.0).step_time(**sums)
    assert slow_chip.bound_by == "compute"
    assert slow_chip.step_s == slow_chip.compute_s


def test_the_ridge_batch_is_the_ratio_of_the_peaks():
    """Two operations and two bytes a weight and token: 197e12 / 819e9 = 240.5 tokens on a v5e."""
    assert Roofline(LLAMA, CHIPS["v5e"]).ridge_batch == 241
    assert Roofline(LLAMA, CHIPS["h100"]).ridge_batch == 296
    assert Roofline(LLAMA, CHIPS["h100"], num_chips=8).ridge_batch == 296
    at_ridge = Roofline(LLAMA, CHIPS["v5e"]).step_time(
        num_tokens=241, num_logit_rows=241, num_context_tokens=0, num_pairs=0
    )
    assert 1 <= at_ridge.compute_s / at_ridge.weights_s < 1.005
