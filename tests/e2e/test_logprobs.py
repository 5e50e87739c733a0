"""Logprobs of output and prompt tokens on real programs: those of a one-shot full forward, whatever the
chunks, the cache, the neighbours and the pool; numbers that JSON can hold, whatever the options.
"""

import ast
import functools
import json
import math
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cli.request_line import RequestLine
from jaxserve.cli.run_output import encode_record, success_record
from jaxserve.device.compile_counter import CompileCounter
from jaxserve.errors import InvalidRequestError, NonFiniteError
from jaxserve.llm import LLM
from jaxserve.request import RequestOutput, merge_outputs
from jaxserve.sampling_params import BeamParams, SamplingParams
from tests import numpy_llama
from tests.checkpoints import make_bigram, make_random_llama
from tests.llms import shared_llm, stream_all
from tests.test_readme import blocks

TOLERANCE = 1e-4
# Pages of each engine by its chunk: of 17 one is the null page, and 16 hold one of the longest requests.
POOLS = {1: 17, 5: 64, 16: 17, 64: 64}
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=2)


@pytest.fixture(scope="module")
def f2(tmp_path_factory):
    """A random model in which every context token matters; 97 ids."""
    return make_random_llama(tmp_path_factory.mktemp("f2"), {"vocab_size": 97})


@pytest.fixture(scope="module")
def truth(f2):
    """Log-probabilities f64[T, V] of a one-shot full forward."""

    @functools.cache
    def rows(ids: tuple[int, ...]) -> np.ndarray:
        return numpy_llama.log_softmax(numpy_llama.forward(f2, ids))

    return lambda ids: rows(tuple(ids))


def engine(model, chunk: int = 64) -> LLM:
    options = {"max_num_batched_tokens": chunk, "num_pages": POOLS[chunk]}
    return shared_llm(model, page_size=4, max_model_len=64, **options)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(length)]


def assert_scored(output: RequestOutput, ids: list[int], rows: np.ndarray, start: int = 1) -> None:
    """prompt_logprobs against f64[T, V]; likeliest ids that are as good as equal may swap."""
    found = output.prompt_logprobs
    assert found is not None
    assert len(found) == len(ids)
    assert found[:start] == [None] * start
    for i, one in enumerate(found[start:], start=start):
        before = rows[i - 1]
        assert one is not None
        assert one.logprob == pytest.approx(before[ids[i]], abs=TOLERANCE)
        best = np.sort(before)[::-1][: len(one.top)]
        assert [x for _, x in one.top] == pytest.approx(best, abs=TOLERANCE)
        assert [x for _, x in one.top] == pytest.approx(
            [before[token_id] for token_id, _ in one.top], abs=TOLERANCE
        )
        surely_likelier = int(np.sum(before > before[ids[i]] + TOLERANCE))
        perhaps_likelier = int(np.sum(before > before[ids[i]] - TOLERANCE))
        assert surely_likelier < one.rank <= perhaps_likelier


@pytest.mark.parametrize("chunk", POOLS)
def test_c10_prompt_logprobs_are_those_of_one_forward_cold_and_warm(f2, truth, chunk):
    """33 tokens over pages of 4; again warm; and after a request that shares 16 tokens."""
    llm = engine(f2, chunk)
    prompt = prompt_of(33)
    llm.engine.scheduler.kv.clear_cache()
    for _ in range(2):
        (output,) = llm.generate([prompt], SCORED)
        assert_scored(output, prompt, truth(prompt))
        assert output.outputs[0].token_ids == []
    llm.engine.scheduler.kv.clear_cache()
    llm.generate([[*prompt[:16], 1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    (output,) = llm.generate([prompt], SCORED)
    assert_scored(output, prompt, truth(prompt))
    (scored,) = llm.score([prompt], start=17)
    assert scored.num_cached_tokens == 16
    want = [truth(prompt)[i - 1, prompt[i]] for i in range(17, 33)]
    assert scored.logprobs == pytest.approx(want, abs=TOLERANCE)
    assert scored.total == pytest.approx(sum(want), abs=16 * TOLERANCE)
    llm.engine.check_invariants()


@pytest.mark.parametrize("chunk", POOLS)
@settings(max_examples=12, deadline=None)
@given(
    is_warm=st.booleans(),
    num_decode_steps=st.sampled_from([1, 3]),
    asks=st.lists(
        st.tuples(
            st.integers(1, 40),
            st.booleans(),
            st.sampled_from([None, 0, 2, 20]),
            st.integers(0, 4),
            st.sampled_from([None, 0, 1, 20]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_neighbours_chunks_and_tiny_pools_change_no_logprob(
    f2, truth, chunk, is_warm, num_decode_steps, asks
):
    """In the small pools they preempt each other."""
    llm = engine(f2, chunk)
    if not is_warm:
        llm.engine.scheduler.kv.clear_cache()
    prompts = [prompt_of(length, 0 if shared else length) for length, shared, *_ in asks]
    params = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            prompt_logprobs=scored,
            logprobs=logprobs,
        )
        for *_, scored, max_tokens, logprobs in asks
    ]
    scheduler = llm.engine.scheduler
    before, scheduler.num_decode_steps = scheduler.num_decode_steps, num_decode_steps
    try:
        outputs = llm.generate(prompts, params)
    finally:
        scheduler.num_decode_steps = before
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        (completion,) = output.outputs
        whole = [*prompt, *completion.token_ids]
        rows = truth(whole)
        if one.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert_scored(output, prompt, rows)
        assert len(completion.token_ids) == one.max_tokens
        assert_sampled(completion, len(prompt), whole, rows, one)
    llm.engine.check_invariants()


def assert_sampled(completion, num_prompt, whole, rows, params) -> None:
    assert (completion.logprobs is None) == (not params.wants_logprobs)
    assert (completion.top_logprobs is None) == (params.num_top_logprobs == 0)
    positions = range(num_prompt, len(whole))
    if completion.logprobs is not None:
        want = [rows[i - 1, whole[i]] for i in positions]
        assert completion.logprobs == pytest.approx(want, abs=TOLERANCE)
    if completion.top_logprobs is not None:
        for i, top in zip(positions, completion.top_logprobs, strict=True):
            assert len(top) == params.num_top_logprobs
            best = np.sort(rows[i - 1])[::-1][: len(top)]
            assert [x for _, x in top] == pytest.approx(best, abs=TOLERANCE)
            assert top[0] == (whole[i], pytest.approx(completion.logprobs[i - num_prompt]))


def test_what_is_streamed_is_what_is_whole(f2):
    """Ids, text, logprobs, likeliest tokens and prompt_logprobs, with choices and stop ids."""
    llm = engine(f2)
    num_parts = 0
    for seed in range(6):
        params = SamplingParams(
            max_tokens=12,
            temperature=1.5,
            seed=seed,
            n=1 + seed % 3,
            logprobs=3,
            prompt_logprobs=seed % 3,
            stop_token_ids=list(range(0, 97, 9)),
        )
        prompt = prompt_of(20, seed)
        (whole,) = llm.generate([prompt], params)
        parts = stream_all(llm, prompt, params)
        merged = merge_outputs(parts)
        num_parts += len(parts)
        for one, other in zip(merged.outputs, whole.outputs, strict=True):
            assert (one.token_ids, one.text) == (other.token_ids, other.text)
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert len(one.top_logprobs) == len(other.top_logprobs) == len(one.token_ids)
            for top, same in zip(one.top_logprobs, other.top_logprobs, strict=True):
                assert [x for _, x in top] == pytest.approx([x for _, x in same], abs=1e-5)
        for one, other in zip(merged.prompt_logprobs, whole.prompt_logprobs, strict=True):
            assert one is other is None or one.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert num_parts > 12


def test_nothing_is_scored_and_nothing_compiles_where_nobody_asks(f2):
    llm = engine(f2)
    counter = CompileCounter()
    called = []
    programs = llm.engine.executor.programs

    def note(key, executable):
        return lambda *arguments: (called.append(key[0]), executable(*arguments))[1]

    with programs.called_through(note):
        llm.generate([prompt_of(20)], SamplingParams(max_tokens=3, ignore_eos=True, logprobs=0))
        assert not {"gather_scored", "score", "score_top", "candidates"} & set(called)
        llm.generate([prompt_of(20)], SamplingParams(max_tokens=0, prompt_logprobs=0))
        assert {"gather_scored", "score"} <= set(called)
        assert not {"score_top", "candidates"} & set(called)
        llm.generate([prompt_of(20)], SamplingParams(max_tokens=2, prompt_logprobs=1, logprobs=1))
        assert {"score_top", "candidates"} <= set(called)
    assert counter.count == 0


def test_c10_a_long_prompt_is_scored_in_several_blocks(f2, truth):
    """More rows than a block has, in one step."""
    options = {"page_size": 16, "max_model_len": 256, "max_num_batched_tokens": 256}
    llm = shared_llm(f2, **options, max_num_seqs=2, num_pages=64)
    prompts = [prompt_of(150, 1), prompt_of(90, 2)]
    for prompt, output in zip(prompts, llm.generate(prompts, SCORED), strict=True):
        assert_scored(output, prompt, truth(prompt))


def test_score_shares_contexts_and_says_what_is_greedy(f2, truth):
    llm = engine(f2)
    llm.engine.scheduler.kv.clear_cache()
    context = prompt_of(21, 9)
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    continuation = llm.generate([context], greedy)[0].outputs[0].token_ids
    llm.engine.scheduler.kv.clear_cache()
    last = (continuation[-1] + 1) % 97
    texts = [
        [*context, *continuation],
        [*context, *continuation[:-1], last],
        [*context, continuation[0]],
    ]
    best, *others = llm.score(texts, start=len(context))
    for text, one in zip(texts, [best, *others], strict=True):
        rows = truth(text)
        want = [rows[i - 1, text[i]] for i in range(21, len(text))]
        assert one.logprobs == pytest.approx(want, abs=TOLERANCE)
        assert one.total == pytest.approx(sum(want), abs=TOLERANCE * len(want))
        assert (one.token_ids, one.start) == (text, 21)
    assert best.is_greedy
    assert best.ranks == [1] * 4
    assert [one.is_greedy for one in others] == [False, True]
    assert sum(one.num_cached_tokens for one in others) == 2 * 20  # all but the last of 21
    (alone,) = llm.score(context)
    assert alone.logprobs[0] is alone.ranks[0] is None
    assert len(alone.logprobs) == 21
    (one,) = llm.score([[5]])
    (of_an_array,) = llm.score([np.array([5, 6])])
    assert [type(i) for i in of_an_array.token_ids] == [int, int]
    assert (one.logprobs, one.total, one.is_greedy) == ([None], 0.0, True)


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (4, "below the length of its prompt"),
        (-1, "an integer >= 0"),
        (True, "an integer >= 0"),
        (1.5, "an integer >= 0"),
        ([1, 2], "got 2 for 1"),
    ],
)
def test_a_bad_start_is_named(f2, start, says):
    llm = engine(f2)
    with pytest.raises(InvalidRequestError, match=says) as caught:
        llm.score([[1, 2, 3, 4]], start=start)
    assert caught.value.param == "start"


SUPPORT = [0.5, 0.25, 0.15, 0.06, 0.04]


@pytest.fixture(scope="module")
def bigram(tmp_path_factory):
    """Five ids with these probabilities after every token; nothing else is possible."""
    logits = np.full(40, -1e6, np.float32)
    logits[:5] = np.log(SUPPORT)
    default = dict(enumerate(logits.tolist()))
    return make_bigram(tmp_path_factory.mktemp("bigram"), {}, vocab_size=40, default=default)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 2.0, "seed": 1},
        {"top_k": 1},
        {"top_p": 0.1},
        {"min_p": 0.9},
        {"temperature": 0, "logit_bias": {3: 50.0}},
        {"temperature": 0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_c22_logprobs_do_not_depend_on_how_tokens_are_drawn(bigram, options):
    llm = shared_llm(bigram)
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3, **options)
    (one,) = llm.generate([[7, 8]], params)[0].outputs
    for token_id, logprob, top in zip(one.token_ids, one.logprobs, one.top_logprobs, strict=True):
        assert logprob == pytest.approx(math.log(SUPPORT[token_id]), abs=TOLERANCE)
        assert [token_id for token_id, _ in top] == [0, 1, 2]
        assert [x for _, x in top] == pytest.approx([-0.6931, -1.3863, -1.8971], abs=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {"0": -100, "1": -100}},
        {"allowed_token_ids": [3, 4]},
        {"bad_words": [[0], [1]]},
        {"min_tokens": 3, "stop_token_ids": [0]},
        {"n": 2, "temperature": 2.0},
        {"allowed_token_ids": [3, 4], "processed_logprobs": True},
        {"top_k": 1, "processed_logprobs": True},
        {"temperature": 0, "logit_bias": {"39": 100}, "processed_logprobs": True},
    ],
    ids=str,
)
def test_c22_no_reply_holds_what_json_cannot(bigram, options):
    """20 likeliest tokens of a support of 5: the rest has the least logprob, -9999."""
    llm = shared_llm(bigram)
    params = SamplingParams(
        **({"max_tokens": 4, "seed": 3, "logprobs": 20, "prompt_logprobs": 20} | options)
    )
    (output,) = llm.generate([[7, 0, 8, 39]], params)
    line = RequestLine(index=0, params=params)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    record = json.loads(encode_record(success_record(line, output)), parse_constant=refuse)
    several = record.get("outputs", [record])
    for one in several:
        values = [*one["logprobs"], *(x for top in one["top_logprobs"] for _, x in top)]
        assert all(type(x) is float and -9999 <= x <= 0 for x in values)
        assert all(len(top) == 20 for top in one["top_logprobs"])
        assert min(values) == -9999
        assert all(x == sorted(x, key=lambda pair: -pair[1]) for x in one["top_logprobs"])
    assert record["prompt_logprobs"][0] is None
    scored = [one["logprob"] for one in record["prompt_logprobs"][1:]]
    assert scored == pytest.approx([math.log(0.5), -9999, -9999], abs=TOLERANCE)
    assert [one["rank"] for one in record["prompt_logprobs"][1:]] == [1, 6, 6]


def test_c22_processed_logprobs_are_those_of_what_is_drawn_from(bigram):
    llm = shared_llm(bigram)
    params = SamplingParams(
        max_tokens=3,
        temperature=2.0,
        top_k=2,
        seed=1,
        ignore_eos=True,
        logprobs=3,
        processed_logprobs=True,
        prompt_logprobs=1,
    )
    (output,) = llm.generate([[7, 0]], params)
    weights = np.sqrt(SUPPORT[:2])
    want = np.log(weights / weights.sum())
    for token_id, logprob, top in zip(
        output.outputs[0].token_ids,
        output.outputs[0].logprobs,
        output.outputs[0].top_logprobs,
        strict=True,
    ):
        assert logprob == pytest.approx(want[token_id], abs=TOLERANCE)
        assert [x for _, x in top] == pytest.approx([*want, -9999], abs=TOLERANCE)
    # A prompt's tokens were not drawn: theirs are of the raw logits.
    assert output.prompt_logprobs[1].logprob == pytest.approx(math.log(0.5), abs=TOLERANCE)


def test_beams_have_likeliest_tokens(f2, truth):
    llm = engine(f2)
    prompt = prompt_of(12)
    params = BeamParams(beam_width=3, max_tokens=5, ignore_eos=True, logprobs=4)
    for one in llm.beam_search([prompt], params)[0].outputs:
        whole = [*prompt, *one.token_ids]
        rows = truth(whole)
        for i, top in enumerate(one.top_logprobs, start=len(prompt)):
            best = np.sort(rows[i - 1])[::-1][:4]
            assert [x for _, x in top] == pytest.approx(best, abs=TOLERANCE)


def test_logits_that_are_no_numbers_are_no_scores(tmp_path):
    """Hidden states are finite, and the head alone is at fault."""
    llm = shared_llm(make_bigram(tmp_path, {3: {0: np.nan}}, vocab_size=16))
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        llm.score([[1, 2, 4, 1]])
    llm.engine.check_invariants()
    assert llm.engine.scheduler.kv.num_owned_pages == 0


def test_the_documented_example(repository, capsys):
    """docs/logprobs.md: its Python runs, and it prints what it says."""
    (block,) = blocks("python", (repository / "docs" / "logprobs.md").read_text())
    code, changes = re.subn(r'LLM\("checkpoints/.*?"\)', "small", block)
    assert changes == 1
    exec(compile(code, "logprobs.md", "exec"), {"small": shared_llm()})
    logprobs, is_greedy = capsys.readouterr().out.rsplit(maxsplit=1)
    assert all(-9999 <= x <= 0 for x in ast.literal_eval(logprobs))
    assert is_greedy in ("True", "False")
