"""Plans against numbers worked out by hand, and against what the engine's allocator makes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxserve.device.choices import choose_pool_size
from jaxserve.device.step_shapes import StepShapes
from jaxserve.errors import ConfigError
from jaxserve.model.attention import AttentionKernel
from jaxserve.model.registry import build_model
from jaxserve.model.sharding import local_kv_heads
from jaxserve.plan.chips import CHIPS
from jaxserve.plan.model_table import CONFIGS
from jaxserve.plan.models import MODELS
from jaxserve.plan.planner import (
    PlanConfig,
    fewest_chips,
    kv_bytes_per_token,
    make_plan,
    weight_bytes,
)
from jaxserve.schedule.buckets import Buckets
from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention.layout import KVPages

SERVER = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048)


def config(name="llama-3-8b", chip="h100", **options) -> PlanConfig:
    return PlanConfig(model=MODELS[name], chip=CHIPS[chip], scheduler=SERVER, **options)


def test_the_bytes_of_llama_3_70b():
    asked = config("llama-3-70b", "v5e", num_chips=16)
    assert kv_bytes_per_token(asked) == 327_680 == 2 * 80 * 8 * 128 * 2
    assert weight_bytes(asked.model) == {
        "bfloat16": 2 * 70_553_706_496,
        "float32": 4 * 70_553_706_496,
    }
    memory = make_plan(asked).memory
    assert memory.usable_bytes == 14_400_000_000
    # a 16th of all but the norms; k and v projections twice, for 16 chips hold 8 heads
    norms, twice = 8192 * 161, 80 * 2 * 8192 * 1024
    assert memory.weight_bytes == 2 * ((70_553_706_496 - norms + twice) // 16 + norms)
    assert memory.page_bytes == 256 * 2 * 80 * 1 * 128 * 2
    taken = memory.weight_bytes + memory.step_bytes + memory.count_table_bytes
    assert memory.count_table_bytes == 4 * 256 * 128256 // 16
    assert memory.num_pages == (14_400_000_000 - taken) // memory.page_bytes
    assert 0 < memory.step_bytes < memory.weight_bytes // 20


@pytest.mark.parametrize(
    ("name", "chip", "num_chips", "kv_cache_dtype"),
    [
        ("llama-3-8b", "v5e", 8, "auto"),
        ("llama-3-8b", "h200", 1, "fp8_e4m3"),
        ("llama-3-70b", "v5p", 4, "int8"),
        ("smollm2-135m", "v6e", 1, "auto"),  # 3 kv heads of 64: layout tpu fills a word up
        ("smollm2-135m", "a100", 3, "auto"),
        ("llama-3.2-1b", "v5e", 2, "int8"),
        ("phi-3-mini", "v5p", 1, "auto"),  # head_dim 96, which the TPU kernel does not serve
        ("qwen3-8b", "cpu", 1, "float32"),
    ],
)
def test_page_bytes_are_those_of_the_pool_that_is_made(name, chip, num_chips, kv_cache_dtype):
    asked = config(
        name, chip, num_chips=num_chips, cache=CacheConfig(kv_cache_dtype=kv_cache_dtype)
    )
    plan = make_plan(asked)
    part = asked.model.of_one_chip(num_chips)
    pool = KVPages.zeros(
        plan.layout, 3, plan.page_size, part.num_kv_heads, part.head_dim, jnp.dtype(asked.kv_dtype)
    )
    made = sum(array.nbytes for array in pool.data)
    assert plan.memory.page_bytes == made // 3 * part.num_layers
    assert made % 3 == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_pages_are_counted_as_the_engine_counts_them(monkeypatch, dtype, page_size):
    """The pool of an engine on a machine with as much free memory as the plan leaves."""
    model = CONFIGS["smollm2-135m"]
    cache = CacheConfig(page_size=page_size)
    asked = PlanConfig(
        model=MODELS["smollm2-135m"],
        chip=dataclasses.replace(CHIPS["cpu"], hbm_bytes=900_000_000),
        dtype=dtype,
        cache=cache,
        max_model_len=512,
        num_prompt_tokens=100,
        num_output_tokens=20,
    )
    plan = make_plan(asked)
    shapes = StepShapes(
        model=build_model(model, jnp.dtype(dtype), AttentionKernel(backend=plan.backend)),
        buckets=Buckets.make(max_num_seqs=4096, max_num_batched_tokens=4096),
        num_pages=2,
        page_size=plan.page_size,
        max_pages=512 // plan.page_size,
        layout=dispatch.layout_of(plan.backend),
        dtype=jnp.dtype(dtype),
        kv_dtype=jnp.dtype(dtype),
        layers_per_program=1,
    )
    # free_bytes: what memory_utilization leaves of the machine once the weights are there
    monkeypatch.setattr(
        "jaxserve.device.choices.free_bytes", lambda device, share: plan.memory.free_bytes
    )
    pool = choose_pool_size(EngineConfig(cache=cache), 512, shapes)
    assert pool.reason == "memory_utilization"
    assert pool.num_pages == plan.memory.num_pages
    assert pool.num_bytes == plan.memory.num_pages * plan.memory.page_bytes


def test_weights_of_a_plan_are_those_of_the_params():
    """Every tensor of the model, by the model's own shapes."""
    for name in ("smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "smollm3-3b", "phi-3-mini"):
        params = build_model(
            CONFIGS[name], jnp.dtype("bfloat16"), AttentionKernel(backend="xla")
        ).abstract_params
        assert bytes_of(params) == 2 * MODELS[name].num_params, name


def bytes_of(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_concurrency_counts_whole_pages_and_not_the_null_page():
    plan = make_plan(config(cache=CacheConfig(page_size=64), num_prompt_tokens=1000))
    assert plan.pages_per_sequence == -(-1256 // 64) == 20
    assert plan.max_concurrency == (plan.memory.num_pages - 1) // 20
    assert plan.decode_batch == min(plan.max_concurrency, 256)
    assert plan.decode[-1].num_tokens == plan.decode_batch


def test_decoding_by_hand():
    """Llama-3-8B on one H100 at a context of 1,152: 64 sequences."""
    plan = make_plan(config())
    (found,) = [one for one in plan.decode if one.num_tokens == 64]
    read = 8_030_261_248 - 128256 * 4096 - 4096 * 65  # all but the embedding and the norms
    weights_s = 2 * read / 3350e9
    kv_s = 131072 * 64 * (1152 + 1) / 3350e9
    compute_s = (2 * read * 64 + 4 * 32 * 32 * 128 * 64 * 1152) / 989.5e12
    assert found.time[:3] == pytest.approx((weights_s, kv_s, compute_s))
    assert found.time.overhead_s == found.time.links_s == 0
    assert found.tokens_per_s == pytest.approx(64 / (weights_s + kv_s))


def test_prefill_by_hand():
    """Two whole prompts in a step, and one prompt in two chunks."""
    plan = make_plan(config())
    two = {one.num_tokens: one for one in plan.prefill}[2048]
    matrices = MODELS["llama-3-8b"].num_layer_matmul_params
    attention = 4 * 32 * 32 * 128
    flops = 2 * matrices * 2048 + 2 * 128256 * 4096 * 2 + attention * 2 * 1024 * 1025 // 2
    assert two.tokens_per_s == pytest.approx(2048 / (flops / 989.5e12))
    halves = {one.num_tokens: one for one in plan.prefill}[512]
    pairs = 1024 * 1025 // 2
    flops = 2 * matrices * 1024 + 2 * 128256 * 4096 + attention * pairs
    assert halves.tokens_per_s == pytest.approx(1024 / (flops / 989.5e12))


def test_a_batch_that_is_bound_by_arithmetic_with_its_kv():
    short = make_plan(config(num_prompt_tokens=10, num_output_tokens=10))
    assert short.ridge_batch == 296
    batch = short.ridge_batch_at_lengths
    assert batch is not None
    assert batch > 296
    long = make_plan(config(num_prompt_tokens=100_000))
    assert long.ridge_batch_at_lengths is None


def test_a_window_makes_long_contexts_cheaper():
    plain = MODELS["mistral-7b"]
    narrow = dataclasses.replace(plain, layer_windows=(128,) * 32)
    times = [
        make_plan(
            PlanConfig(model=model, chip=CHIPS["h100"], scheduler=SERVER, num_prompt_tokens=8192)
        )
        .decode[0]
        .time
        for model in (plain, narrow)
    ]
    assert times[1].kv_s / times[0].kv_s == pytest.approx(129 / 8321)
    assert times[1].weights_s == times[0].weights_s


def test_what_does_not_fit_says_by_how_much():
    asked = config("llama-3-70b", "h100")
    plan = make_plan(asked)
    memory = plan.memory
    assert (plan.fits, memory.num_pages, plan.max_concurrency) == (False, 0, 0)
    assert (plan.decode, plan.prefill, plan.decode_batch) == ((), (), 0)
    needed = (1 + plan.pages_per_sequence) * memory.page_bytes
    assert plan.short_by_bytes == needed - memory.free_bytes > 60 * 10**9
    assert fewest_chips(asked) == 2  # 72 GB of each beside 70.6 GB of weights: barely
    # as many bytes more are enough, and one fewer is not
    room = int(plan.short_by_bytes / 0.9) + 1
    larger = dataclasses.replace(asked.chip, hbm_bytes=asked.chip.hbm_bytes + room)
    assert make_plan(dataclasses.replace(asked, chip=larger)).max_concurrency == 1
    smaller = dataclasses.replace(larger, hbm_bytes=larger.hbm_bytes - 10)
    assert not make_plan(dataclasses.replace(asked, chip=smaller)).fits


def test_no_number_of_small_chips_holds_a_wide_model():
    tiny = dataclasses.replace(CHIPS["v5e"], hbm_bytes=10**6)
    assert fewest_chips(dataclasses.replace(config(), chip=tiny)) is None


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama-3-70b", "llama-3.2-1b", "qwen2.5-1.5b", "smollm2-1.7b"])
def test_what_is_planned_on_tpus_is_what_the_engine_would_share(name, kv_cache_dtype):
    cache, served = CacheConfig(kv_cache_dtype=kv_cache_dtype), 0
    for num_chips in range(1, MODELS[name].num_heads + 1):
        try:
            asked = config(name, "v5p", num_chips=num_chips, cache=cache)
            part = asked.model.of_one_chip(num_chips)
        except ConfigError:
            continue
        kv = KVPages.abstract(
            "tpu", 4, 32, part.num_kv_heads * num_chips, part.head_dim, asked.kv_dtype
        )
        try:
            local_kv_heads(kv, num_chips)
        except ValueError:
            # one chip alone fills words up and shares nothing
            if num_chips > 1:
                with pytest.raises(ConfigError, match="do not fill whole words"):
                    make_plan(asked)
                continue
        served += make_plan(asked).layout == "tpu"
    assert served


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_chips": 0}, r"num_chips must be in \[1, 4096\], got 0"),
        ({"num_chips": 3}, "num_chips must divide the model's 32 query heads, got 3"),
        ({"dtype": "float16"}, "dtype must be one of bfloat16, float32, got 'float16'"),
        ({"max_model_len": 200_000}, r"max_model_len must be in \[2, 131072\]"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens must be at least 1, got 0"),
        ({"max_model_len": 1024}, "a prompt of 1024 tokens and 256 more pass max_model_len, 1024"),
        (
            {"chip": "v5e", "cache": CacheConfig(page_size=32)},
            "page_table: 256 rows of 4096 pages take .* bytes of SMEM",
        ),
        (
            {"cache": CacheConfig(page_size=16)},
            "page_size=16: attention backend 'gpu' serves 64 only",
        ),
        (
            {"chip": "v5e", "num_chips": 8, "cache": CacheConfig(kv_cache_dtype="int8")},
            "num_chips=8: the 1 of 8 kv heads .* head_dim 128 and int8 pages, do not fill whole words",
        ),
        (
            {"name": "llama-3.2-1b", "chip": "v5e", "num_chips": 8},
            "num_chips=8: the 1 of 8 kv heads .* head_dim 64 and bfloat16 pages, do not fill",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(config(**options))
