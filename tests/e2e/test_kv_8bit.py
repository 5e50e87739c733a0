"""The engine with an 8-bit KV cache: what it says it serves, how many pages that buys, and tokens that
depend on nothing but the request.
"""

import dataclasses
import logging
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import EngineConfig, Request, load_model
from jaxserve.build.from_loaded import build_loaded
from jaxserve.device.compile_counter import CompileCounter
from jaxserve.errors import ConfigError
from jaxserve.llm import LLM
from jaxserve.model.kv_scales import GivenKVScales, KVScales
from jaxserve.request import SamplingParams
from pallas_kernels import dispatch
from tests import kv_quality
from tests.checkpoints import make_bigram, make_random_llama
from tests.llms import FEW_BUCKETS, TINY, greedy, shared_llm

EIGHT_BIT = ("int8", "fp8_e4m3")
NUM_TOKENS = 8
PROMPTS = [
    [random.Random(n).randrange(512) for _ in range(n)] for n in (1, 2, 5, 13, 17, 33, 65, 90)
]
# Few programs to compile, odd chunks; the whole ladders are those of int8 in `PLAIN`.
SMALL = {"max_num_batched_tokens": 5, "page_size": 4, "token_buckets": (5,), "row_buckets": (4,)}
PLAIN = {
    "auto": {},
    "int8": {"kv_cache_dtype": "int8"},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"} | FEW_BUCKETS,
}
REFERENCE = {"attention_backend": "reference", "max_num_batched_tokens": 8, "page_size": 16}
REFERENCE |= {"token_buckets": (8,), "row_buckets": (4,)}
ARMS = [
    ("int8", SMALL),
    ("int8", {"max_num_batched_tokens": 1}),
    ("int8", REFERENCE),
    ("fp8_e4m3", SMALL),
]
# A key that lies between two steps of the 8-bit type may be rounded to either where a batch of
# another shape gives it another last bit; one such step moves a logprob by far less than this.
LOGPROB_TOLERANCE = 0.02


def completions(llm, prompts=PROMPTS, num_tokens=NUM_TOKENS):
    return [output.outputs[0] for output in llm.generate(prompts, greedy(num_tokens))]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize(("kv_cache_dtype", "arm"), ARMS)
def test_c35_tokens_do_not_depend_on_chunks_pages_buckets_or_backend(kv_cache_dtype, arm):
    plain = completions(shared_llm(**PLAIN[kv_cache_dtype]))
    llm = shared_llm(kv_cache_dtype=kv_cache_dtype, **arm)
    assert_same(completions(llm), plain)
    llm.engine.check_invariants()


@pytest.mark.parametrize("kv_cache_dtype", EIGHT_BIT)
def test_c35_neighbours_and_preemption_do_not_matter(kv_cache_dtype):
    prompts = [[10 * i + j for j in range(8)] for i in range(4)]
    roomy = shared_llm(**PLAIN[kv_cache_dtype])
    alone = [completions(roomy, [prompt], 24)[0] for prompt in prompts]
    assert_same(completions(roomy, prompts, 24), alone)
    tight = shared_llm(kv_cache_dtype=kv_cache_dtype, num_pages=11, **SMALL)
    before = tight.engine.stats().num_preemptions
    assert_same(completions(tight, prompts, 24), alone)
    assert tight.engine.stats().num_preemptions - before >= 2


@pytest.mark.parametrize("kv_cache_dtype", EIGHT_BIT)
def test_the_cache_is_really_in_8_bits(kv_cache_dtype):
    """The control for all above: the pages hold that type, and logprobs are not those of float pages."""
    llm, wide = shared_llm(**PLAIN[kv_cache_dtype]), shared_llm()
    found = [x for one in completions(llm) for x in one.logprobs]
    expected = [x for one in completions(wide) for x in one.logprobs]
    assert np.abs(np.subtract(found, expected)).max() > 1e-4
    leaves = jax.tree.leaves(llm.engine.executor._kv_pages)
    assert {leaf.dtype.itemsize for leaf in leaves} == {1}
    assert any(np.asarray(leaf, np.float32).any() for leaf in leaves)


def test_the_same_memory_holds_four_times_the_pages():
    stats = {name: shared_llm(**options).engine.stats() for name, options in PLAIN.items()}
    assert stats["auto"].kv_cache_dtype == "float32"
    for name in EIGHT_BIT:
        assert stats[name].kv_cache_dtype == name
        assert (
            4 * stats["auto"].num_pages <= stats[name].num_pages < 4 * stats["auto"].num_pages + 4
        )


def test_float_pages_of_another_width_go_without_scales():
    llm = shared_llm(kv_cache_dtype="bfloat16", **SMALL)
    assert llm.engine.executor.kv_scales is None
    assert llm.engine.stats().kv_cache_dtype == "bfloat16"
    for one, other in zip(completions(llm), completions(shared_llm()), strict=True):
        assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.05)


def test_nothing_compiles_after_warm_up_and_pages_stay_where_they_are():
    llm = shared_llm(**PLAIN["int8"])
    completions(llm)

    def pointers():
        leaves = jax.tree.leaves(llm.engine.executor._kv_pages)
        return [leaf.unsafe_buffer_pointer() for leaf in leaves]

    before, counter = pointers(), CompileCounter()
    llm.generate(PROMPTS[::-1] * 3, SamplingParams(max_tokens=5, temperature=0.8, seed=1))
    assert counter.count == 0
    assert pointers() == before


def test_the_start_says_what_was_chosen(caplog):
    with caplog.at_level(logging.INFO, "jaxserve"):
        LLM(
            str(TINY), kv_cache_dtype="int8", max_num_seqs=1, max_num_batched_tokens=1, num_pages=40
        )
    assert "KV scales of int8: 0 came with the model, 4 calibrated on" in caplog.text
    assert "dtype float32, kv_cache_dtype int8, max_model_len" in caplog.text


def test_a_backend_that_does_not_serve_the_type_is_named(monkeypatch):
    narrow = dataclasses.replace(dispatch.BACKENDS["reference"], kv_dtypes=("float32",))
    monkeypatch.setitem(dispatch.BACKENDS, "reference", narrow)
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8: attention backend 'reference'"):
        LLM(str(TINY), kv_cache_dtype="int8", attention_backend="reference")


@pytest.fixture(scope="module")
def loaded():
    return load_model(str(TINY), TestGivenScales.CONFIG)


class TestGivenScales:
    """Scales of `LoadedModel`."""

    CONFIG = EngineConfig.from_options(
        {
            "kv_cache_dtype": "fp8_e4m3",
            "max_num_seqs": 1,
            "max_num_batched_tokens": 16,
            "token_buckets": (16,),
            "max_model_len": 32,
            "num_pages": 4,
        }
    )

    def build(self, loaded, scale: float, kv_cache_dtype="fp8_e4m3", config=CONFIG):
        one = np.full(3, scale, np.float32)
        given = GivenKVScales(kv_cache_dtype=kv_cache_dtype, layers=[KVScales(one, one)] * 2)
        return build_loaded(config, dataclasses.replace(loaded, kv_scales=given))[0]

    def generate(self, engine) -> list[float]:
        engine.add(Request(id="a", prompt_token_ids=list(range(20)), sampling_params=greedy(4)))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        return [x for output in outputs for x in output.outputs[0].logprobs]

    def test_c35_values_beyond_the_range_saturate(self, loaded):
        """Keys and values reach about 10; here a unit is so small that 448 of them reach 0.01."""
        engine = self.build(loaded, 0.01 / 448)
        logprobs = self.generate(engine)
        assert np.isfinite(logprobs).all()
        for kv in engine.executor._kv_pages:
            pages = np.asarray(kv.gather(jnp.arange(1, 4, dtype=jnp.int32)), np.float32)
            assert np.abs(pages).max() == 448
        good = self.generate(self.build(loaded, 10 / 448))
        assert np.abs(np.subtract(logprobs, good)).max() > 0.1  # the control

    def test_they_are_used_as_they_are(self, loaded):
        for layer in self.build(loaded, 0.125).executor.kv_scales:
            np.testing.assert_array_equal(np.stack(layer), np.full((2, 3), 0.125, np.float32))

    def test_those_of_another_type_are_refused(self, loaded):
        with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8_e4m3: .* kv_scales of int8"):
            self.build(loaded, 1.0, "int8")

    def test_one_that_cannot_be_divided_by_is_refused(self, loaded):
        with pytest.raises(ConfigError, match="kv_scales: layer 0, k: a scale must be a finite"):
            self.build(loaded, 0.0)

    def test_float_pages_read_none(self, loaded):
        cache = dataclasses.replace(self.CONFIG.cache, kv_cache_dtype="float32")
        engine = self.build(loaded, 0.0, config=dataclasses.replace(self.CONFIG, cache=cache))
        assert engine.executor.kv_scales is None


def test_a_model_without_a_tokenizer_is_calibrated_on_drawn_ids(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "jaxserve"):
        llm = shared_llm(make_random_llama(tmp_path), kv_cache_dtype="int8", **SMALL)
    assert "4 calibrated on 256 tokens" in caplog.text
    assert len(completions(llm, [[1, 2, 3]])[0].token_ids) == NUM_TOKENS


@pytest.fixture(scope="module")
def bigram(tmp_path_factory):
    rng = np.random.default_rng(4)
    logits = {token: rng.permutation(32).astype(np.float32) for token in range(32)}
    return make_bigram(tmp_path_factory.mktemp("bigram"), logits, vocab_size=32)


@pytest.mark.parametrize("kv_cache_dtype", EIGHT_BIT)
def test_c35_the_bigram_model_says_the_same_in_8_bits(bigram, kv_cache_dtype):
    wide, narrow = (
        shared_llm(bigram, kv_cache_dtype=name, **SMALL) for name in ("auto", kv_cache_dtype)
    )
    prompts = [[token] for token in range(0, 32, 4)]
    for one, other in zip(
        completions(narrow, prompts, 20), completions(wide, prompts, 20), strict=True
    ):
        assert one.token_ids == other.token_ids


# Mean |delta logprob| over random texts of the tiny model, whose weights are wide on purpose.
TINY_DRIFT = {"int8": 0.03, "fp8_e4m3": 0.1}


@pytest.mark.parametrize("kv_cache_dtype", EIGHT_BIT)
def test_c35_drift_of_the_tiny_model_is_bounded(kv_cache_dtype):
    model = kv_quality.load(TINY)
    texts = [prompt for prompt in PROMPTS if len(prompt) > 10]
    scales = shared_llm(**PLAIN[kv_cache_dtype]).engine.executor.kv_scales
    wide = kv_quality.text_logprobs(model, texts)
    drift = np.abs(kv_quality.text_logprobs(model, texts, kv_cache_dtype, scales) - wide).mean()
    assert 1e-3 < drift < TINY_DRIFT[kv_cache_dtype]
    factor = 16.0 if kv_cache_dtype == "int8" else 1 / 16  # the control
    scales = jax.tree.map(lambda scale: scale * factor, scales)
    wrong = np.abs(kv_quality.text_logprobs(model, texts, kv_cache_dtype, scales) - wide).mean()
    print(f"{kv_cache_dtype}: drift {drift:.4f}, wrong {wrong:.4f}")
    assert wrong > 3 * TINY_DRIFT[kv_cache_dtype]
