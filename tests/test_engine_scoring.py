"""Prompt tokens that are scored, and the likeliest tokens of each output token, over the fake device:
every value depends on the whole context that attention would read.
"""

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.request import PromptLogprob, Request, merge_outputs
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.seeds import choice_seed
from tests.fakes import (
    FakeExecutor,
    drain,
    expected_tokens,
    fake_candidates,
    fake_score,
    make_engine,
)
from tests.test_engine_interrupted import InterruptAt

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def expected_top(context: list[int], count: int) -> list[tuple[int, float]]:
    ids, logprobs = fake_candidates(context)
    return list(zip(ids[:count].tolist(), logprobs[:count].tolist(), strict=True))


def expected_scores(prompt: list[int], count: int, start: int = 0) -> list[PromptLogprob | None]:
    found: list[PromptLogprob | None] = [None] * max(1, start)
    for i in range(len(found), len(prompt)):
        logprob, rank = fake_score(prompt[:i], prompt[i])
        top = expected_top(prompt[:i], count)
        found.append(PromptLogprob(float(np.float32(logprob)), top, rank))
    return found


def score_request(name="a", prompt=PROMPT, start=0, count=2, **fields) -> Request:
    params = SamplingParams(
        **({"max_tokens": 0, "prompt_logprobs": count, "ignore_eos": True} | fields)
    )
    return Request(
        id=name, prompt_token_ids=prompt, sampling_params=params, prompt_logprobs_start=start
    )


class Counting(FakeExecutor):
    """Counts what is scored, and the logit rows."""

    num_scored = 0
    num_rows = 0

    def _run(self, batch):
        self.num_scored += len(batch.score_rows)
        self.num_rows += batch.num_rows
        return super()._run(batch)


# What a request may ask for in the random mix: (prompt_logprobs, logprobs, max_tokens, n, start).
ASKS = st.tuples(
    st.sampled_from([None, 0, 1, 3, 20]),
    st.sampled_from([None, True, 0, 1, 5, 20]),
    st.integers(0, 9),
    st.sampled_from([1, 1, 1, 3]),
    st.integers(0, 12),
)


@settings(max_examples=120, deadline=None)
@given(
    asks=st.lists(st.tuples(st.integers(1, 30), st.booleans(), ASKS), min_size=1, max_size=6),
    num_pages=st.integers(12, 40),
    options=st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.sampled_from([1, 5, 16, 64]),
            "max_num_seqs": st.integers(1, 5),
            "preemption_mode": st.sampled_from(["recompute", "swap"]),
            "num_host_pages": st.sampled_from([0, 30]),
            "enable_prefix_caching": st.booleans(),
            "async_scheduling": st.booleans(),
            "num_decode_steps": st.sampled_from([1, 4]),
        }
    ),
)
def test_every_mix_gives_what_each_request_gives_alone(asks, num_pages, options):
    """Ids, logprobs, likeliest tokens and prompt_logprobs are cut and joined at the same places."""
    if not options["num_host_pages"]:
        options["preemption_mode"] = "recompute"
    engine = make_engine(num_pages=num_pages, draws=True, **options)
    requests = {}
    for number, (length, is_shared, (scored, logprobs, max_tokens, n, start)) in enumerate(asks):
        prompt = [(7 * i + (0 if is_shared else number + 1)) % 1000 for i in range(length)]
        start = 0 if scored is None else min(start, length - 1)
        name = str(number)
        requests[name] = score_request(
            name,
            prompt,
            start,
            scored,
            max_tokens=max_tokens,
            n=n,
            seed=number,
            logprobs=logprobs,
        )
        engine.add(requests[name])
    parts = drain(engine)
    for name, request in requests.items():
        check(request, parts[name])


def check(request: Request, parts: list) -> None:
    """Its outputs, part by part and whole, against what the fake model says of it alone."""
    params, prompt = request.sampling_params, list(request.prompt_token_ids)
    output = merge_outputs(parts)
    scores = None
    if params.prompt_logprobs is not None:
        count = params.prompt_logprobs
        scores = expected_scores(prompt, count, request.prompt_logprobs_start)
    assert output.prompt_logprobs == scores
    assert all(part.prompt_logprobs is parts[0].prompt_logprobs for part in parts)
    assert len(output.outputs) == params.n
    for one in output.outputs:
        seed = choice_seed(params.seed, one.index)
        ids = expected_tokens(prompt, params.max_tokens, seed)
        assert (one.token_ids, one.finish_reason) == (ids, "length")
        assert (one.logprobs is None) == (not params.wants_logprobs)
        assert one.logprobs is None or len(one.logprobs) == len(ids)
        assert (one.top_logprobs is None) == (not params.num_top_logprobs)
        for position, top in enumerate(one.top_logprobs or ()):
            drawn = [seed >> 32, seed & 0xFFFFFFFF, position]
            context = [*prompt, *ids[:position], *drawn]
            assert top == expected_top(context, params.num_top_logprobs)
    for part in parts:
        for piece in part.outputs:
            for values in (piece.logprobs, piece.top_logprobs):
                assert values is None or len(values) == len(piece.token_ids)


def test_a_request_for_no_tokens_is_scored_and_shows_none():
    engine = make_engine(executor_class=Counting)
    engine.add(score_request())
    (part,) = drain(engine)["a"]
    (one,) = part.outputs
    assert (one.token_ids, one.text, one.finish_reason) == ([], "", "length")
    assert (part.num_prompt_tokens, part.finished) == (9, True)
    assert part.prompt_logprobs == expected_scores(PROMPT, 2)
    assert (engine.executor.num_scored, engine.stats().num_output_tokens) == (8, 0)
    assert engine.scheduler.kv.num_owned_pages == 0


def test_c07_a_prompt_of_exactly_the_context_is_scored_and_no_longer_one():
    engine = make_engine(max_model_len=64, num_pages=17)
    for length in (63, 64):
        prompt = list(range(length))
        engine.add(score_request(prompt=prompt, count=0))
        assert drain(engine)["a"][-1].prompt_logprobs == expected_scores(prompt, 0)
    with pytest.raises(InvalidRequestError, match="max_model_len") as caught:
        engine.add(score_request(prompt=list(range(65))))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequestError, match="max_model_len"):
        engine.add(score_request(prompt=list(range(64)), max_tokens=1))


def test_a_single_token_has_nothing_before_it():
    engine = make_engine(executor_class=Counting)
    engine.add(score_request(prompt=[5], max_tokens=2))
    assert merge_outputs(drain(engine)["a"]).prompt_logprobs == [None]
    assert engine.executor.num_scored == 0


@pytest.mark.parametrize(("start", "num_cached"), [(0, 0), (1, 0), (4, 3), (5, 4), (8, 7), (9, 8)])
def test_only_what_lies_before_the_first_scored_token_comes_from_the_cache(start, num_cached):
    """Its predecessor is computed. Pages are of four tokens; a page that is used in part is copied."""
    engine = make_engine(executor_class=Counting)
    prompt = list(range(10))
    for _ in range(2):
        engine.add(score_request(prompt=prompt, count=1))
        drain(engine)
    assert engine.executor.num_scored == 18  # nothing was matched
    engine.add(score_request(prompt=prompt, start=start))
    (output,) = drain(engine)["a"]
    assert output.num_cached_tokens == num_cached
    assert output.prompt_logprobs == expected_scores(prompt, 2, start)
    assert engine.executor.num_scored == 18 + 10 - max(1, start)


@pytest.mark.parametrize("start", [9, -1, True, 1.5, "2"])
def test_a_bad_start_is_named(start):
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="prompt_logprobs_start") as caught:
        engine.add(score_request(start=start))
    assert caught.value.param == "prompt_logprobs_start"


def test_a_start_without_prompt_logprobs_is_refused():
    with pytest.raises(InvalidRequestError, match="none are asked for"):
        score_request(start=3, count=None)


def test_choices_are_scored_once():
    engine = make_engine(executor_class=Counting, draws=True)
    engine.add(score_request(n=3, max_tokens=4, seed=1))
    output = merge_outputs(drain(engine)["a"])
    assert output.prompt_logprobs == expected_scores(PROMPT, 2)
    assert engine.executor.num_scored == len(PROMPT) - 1
    engine.add(score_request("b", n=3))
    (part,) = drain(engine)["b"]
    assert [(one.index, one.token_ids) for one in part.outputs] == [(0, []), (1, []), (2, [])]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_next_choice_goes_on_with_the_scores_of_one_that_was_aborted(num_steps):
    engine = make_engine(executor_class=Counting, max_num_batched_tokens=2, max_num_seqs=2)
    engine.add(score_request(n=3, max_tokens=2))
    for _ in range(num_steps):
        assert engine.step() == []
    aborted = engine.abort("a", 0)
    assert aborted is not None
    assert aborted.prompt_logprobs is None
    output = merge_outputs(drain(engine)["a"])
    assert output.prompt_logprobs == expected_scores(PROMPT, 2)
    assert engine.executor.num_scored == len(PROMPT) - 1


def test_what_ended_before_all_was_scored_has_no_scores():
    engine = make_engine(poison=[8], max_num_batched_tokens=2, max_num_seqs=2)
    engine.add(score_request())
    (part,) = drain(engine)["a"]
    assert (part.outputs[0].finish_reason, part.prompt_logprobs) == ("error", None)


def test_a_branch_does_not_score_its_parents_tokens_again():
    engine = make_engine(executor_class=Counting)
    engine.add(
        Request(
            id="a",
            prompt_token_ids=PROMPT,
            sampling_params=SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1),
            hold=True,
        )
    )
    drain(engine)
    engine.fork("a", "b")
    output = merge_outputs(drain(engine)["b"])
    assert output.prompt_logprobs is None
    assert output.num_cached_tokens == 12
    engine.fork("a", "c", sampling_params=SamplingParams(max_tokens=0, prompt_logprobs=3))
    (output,) = drain(engine)["c"]
    prompt = [*PROMPT, *expected_tokens(PROMPT, 4)]
    assert output.prompt_logprobs == expected_scores(prompt, 3)


def test_beams_have_the_likeliest_tokens_of_each_step():
    engine = make_engine()
    beam = BeamParams(beam_width=3, max_tokens=5, logprobs=4)
    engine.add(Request(id="a", prompt_token_ids=PROMPT, beam=beam))
    for one in drain(engine)["a"][-1].outputs:
        contexts = [[*PROMPT, *one.token_ids[:i]] for i in range(len(one.token_ids))]
        assert one.top_logprobs == [expected_top(context, 4) for context in contexts]
        tops = zip(one.token_ids, one.logprobs, one.top_logprobs, strict=True)
        assert all((token_id, logprob) in top for token_id, logprob, top in tops)
    engine.add(
        Request(id="b", prompt_token_ids=PROMPT, beam=BeamParams(beam_width=2, max_tokens=2))
    )
    assert all(one.top_logprobs is None for one in drain(engine)["b"][-1].outputs)


@pytest.mark.parametrize("logprobs", [True, 0])
def test_true_and_0_ask_for_the_chosen_token_alone(logprobs):
    engine = make_engine(executor_class=Counting)
    engine.add(score_request(count=None, max_tokens=3, logprobs=logprobs))
    (one,) = merge_outputs(drain(engine)["a"]).outputs
    assert (len(one.logprobs), one.top_logprobs) == (3, None)
    assert not engine.executor.last_batch.wants_candidates


def test_an_interrupt_at_any_line_loses_no_score():
    """What was scored is kept or scored again; likeliest tokens stay beside their ids."""
    for count in itertools.count(1, 29):
        engine = make_engine(num_pages=12, max_num_batched_tokens=8, max_num_seqs=3)
        requests = [
            score_request("a", list(range(14)), max_tokens=5, logprobs=3, temperature=0, seed=0),
            score_request("b", list(range(3, 9)), start=2, temperature=0, seed=0),
        ]
        for request in requests:
            engine.add(request)
        parts = {"a": [], "b": []}
        interrupt = InterruptAt(count)
        sys.settrace(interrupt)
        try:
            while engine.has_work():
                for output in engine.step():
                    parts[output.request_id].append(output)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        for name, more in drain(engine).items():
            parts[name] += more
        for request in requests:
            output = merge_outputs(parts[request.id])
            assert output.prompt_logprobs == expected_scores(
                list(request.prompt_token_ids), 2, request.prompt_logprobs_start
            )
        (one,) = merge_outputs(parts["a"]).outputs
        assert one.token_ids == expected_tokens(list(range(14)), 5)
        contexts = [[*range(14), *one.token_ids[:i]] for i in range(5)]
        assert one.top_logprobs == [expected_top(context, 3) for context in contexts]
        if not interrupt.fired:
            return
