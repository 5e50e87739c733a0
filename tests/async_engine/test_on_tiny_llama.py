"""Engines of both kinds on a real, tiny model: they say what `LLM` says, text and all."""

import asyncio
import json
from contextlib import aclosing

import jax
import pytest

import jaxserve
from jaxserve.async_engine.process import ProcessEngine
from jaxserve.async_engine.thread import AsyncEngine
from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.request import Request, merge_outputs
from jaxserve.sampling_params import BeamParams, SamplingParams
from tests.async_engine.clients import KINDS, greedy_request, parts_of, run
from tests.llms import FEW_BUCKETS, TINY, shared_llm

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "kv_cache_gib": 0.01,
    **FEW_BUCKETS,
}
PROMPT = "Once upon a time"


WAYS = {
    "text": {},
    "stop": {"stop": ["e"], "ignore_eos": True, "max_tokens": 60},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
    "choices": {"n": 3, "temperature": 1.0, "seed": 5},
    "json": {"structured_outputs": {"json": {"type": "array", "items": {"type": "boolean"}}}},
    "bad_words": {"bad_words": ["the", " a"], "repetition_penalty": 1.2},
}


def request_of(way: str) -> Request:
    ids = shared_llm(**FEW_BUCKETS).encode(PROMPT)
    return greedy_request(way, ids, **({"max_tokens": 24} | WAYS[way]))


@pytest.fixture(scope="module")
def wanted():
    """What `LLM` makes of each request; found out first: later its engine has a thread of its own."""
    llm = shared_llm(**FEW_BUCKETS)
    requests = {way: request_of(way) for way in WAYS}
    return {
        way: llm.generate([one.prompt_token_ids], one.sampling_params)[0].outputs
        for way, one in requests.items()
    }


@pytest.fixture(scope="module", params=KINDS)
def engine(request, wanted):
    """(an event loop, an engine that runs in it)"""
    with asyncio.Runner() as runner:
        if request.param == "thread":
            client = AsyncEngine.from_llm(shared_llm(**FEW_BUCKETS))
        else:
            kept = jax.config.jax_compilation_cache_dir
            client = ProcessEngine(str(TINY), compilation_cache_dir=kept, **OPTIONS)
        runner.run(client.start())
        yield runner, client
        runner.run(client.shutdown())


@pytest.mark.parametrize("way", WAYS)
def test_it_says_what_llm_says(engine, wanted, way):
    runner, client = engine
    whole = merge_outputs(runner.run(parts_of(client, request_of(way))))
    wanted = wanted[way]
    assert [one.text for one in whole.outputs] == [one.text for one in wanted]
    assert [one.token_ids for one in whole.outputs] == [one.token_ids for one in wanted]
    assert [one.finish_reason for one in whole.outputs] == [one.finish_reason for one in wanted]
    if way == "logprobs":
        assert whole.outputs[0].logprobs == pytest.approx(wanted[0].logprobs, abs=1e-4)


def test_beams_have_texts(engine):
    runner, client = engine
    ids = client.model.tokenizer.encode(PROMPT)
    beam = BeamParams(beam_width=3, max_tokens=8, ignore_eos=True)
    request = Request(id="b", prompt_token_ids=ids, beam=beam)
    whole = merge_outputs(runner.run(parts_of(client, request)))
    assert len(whole.outputs) == 3
    for one in whole.outputs:
        assert one.text == client.model.tokenizer.decode(one.token_ids)
        assert one.text
        assert one.score is not None


def test_the_model_is_told(engine):
    _, client = engine
    llm = shared_llm(**FEW_BUCKETS)
    model = client.model
    assert (model.max_model_len, model.vocab_size) == (128, llm.engine.vocab_size)
    assert (model.max_num_seqs, model.num_slots) == (4, llm.engine.scheduler.kv.num_slots)
    assert model.eos_token_ids == tuple(sorted(llm.engine.eos_token_ids))
    assert model.default_sampling_params == llm.default_sampling_params
    chat = [{"role": "user", "content": "hi"}]
    assert model.tokenizer.encode_chat(chat) == llm.encode_chat(chat)


def test_bad_grammars_and_words_are_refused(engine):
    runner, client = engine
    cases = [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs.json"),
        ({"logit_bias": {10**6: 1}}, "logit_bias"),
    ]

    async def go(fields, param):
        with pytest.raises(InvalidRequestError) as error:
            await parts_of(client, greedy_request("a", [1, 2], **fields))
        assert error.value.param == param

    for fields, param in cases:
        runner.run(go(fields, param))


def test_everything_is_given_back(engine):
    runner, client = engine

    async def go():
        async with aclosing(client.generate(greedy_request("a", [1, 2], 100, n=4))) as parts:
            await anext(parts)
        stats = await client.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_owned_pages) == (0, 0, 0)
        await client.reset_prefix_cache()
        stats = await client.stats()
        assert stats.num_free_pages == stats.num_pages - 1
        assert json.dumps(stats.to_dict())

    runner.run(go())


def test_prompts_as_they_are():
    """The friendly signature of `AsyncEngine`, over an `LLM` that is there already."""
    llm = shared_llm(**FEW_BUCKETS)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    echo = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, echo=True, n=2)
    wanted = llm.generate(PROMPT, params)[0].outputs[0]
    with_prompt = llm.generate(PROMPT, echo)[0].outputs

    async def go():
        async with jaxserve.AsyncEngine.from_llm(llm) as engine:
            plain = [part async for part in engine.generate(PROMPT, params)]
            ids = [part async for part in engine.generate(llm.encode(PROMPT), params)]
            echoed = [part async for part in engine.generate(PROMPT, echo)]
            default = [part async for part in engine.generate(PROMPT)]
            for wrong in (3, ["a", "b"], []):
                with pytest.raises(InvalidRequestError):
                    engine.generate(wrong)
            with pytest.raises(InvalidRequestError, match="sampling_params"):
                engine.generate(greedy_request("a", [1]), params)
            return [merge_outputs(parts).outputs for parts in (plain, ids, echoed, default)]

    plain, ids, echoed, default = run(go())
    assert plain == ids == [wanted]
    assert echoed == with_prompt
    assert echoed[1].text.startswith(PROMPT)
    assert len(default[0].token_ids) > 0
    # It is the caller's own again.
    assert llm.generate(PROMPT, params)[0].outputs[0] == wanted


def test_a_busy_llm_is_refused():
    llm = shared_llm(**FEW_BUCKETS)
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    next(stream)
    with pytest.raises(ValueError, match="in flight"):
        AsyncEngine.from_llm(llm)
    stream.close()


@pytest.mark.parametrize("kind", [AsyncEngine, ProcessEngine])
def test_a_model_that_is_not_there(kind, tmp_path):
    async def go():
        with pytest.raises(CheckpointError, match="nowhere"):
            await kind(str(tmp_path / "nowhere")).start()

    run(go())
