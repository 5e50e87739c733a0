"""The engine at its border: what it refuses, what it clamps, how a request ends."""

import math

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, InvalidRequestError, shown
from jaxserve.request import CacheSalt, Request, SamplingParams, merge_outputs
from jaxserve.seeds import choice_seed, derive_seed
from tests.fakes import drain, expected_tokens, make_engine

PROMPT = [5, 6, 7]


def add(engine, name="a", prompt=PROMPT, watcher=None, **params):
    params = {"temperature": 0, "ignore_eos": True, **params}
    engine.add(
        Request(id=name, prompt_token_ids=prompt, sampling_params=SamplingParams(**params)), watcher
    )


def run(engine, **kwargs):
    add(engine, **kwargs)
    return merge_outputs(drain(engine)["a"]).outputs[0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one token"),
        ([1, 1000], r"in \[0, 1000\), got 1000"),
        ([-1], r"got -1"),
        ([True], "got True"),
        ([1.0], "got 1.0"),
        (["x"], "got 'x'"),
        ([None], "got None"),
    ],
)
def test_c06_a_bad_prompt_fails_alone(prompt, message):
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=message) as caught:
        add(engine, "bad", prompt)
    assert caught.value.param == "prompt"
    assert not engine.has_work()
    assert run(engine, max_tokens=4).token_ids == expected_tokens(PROMPT, 4)
    engine.check_invariants()


@pytest.mark.parametrize("length", [63, 64, 65])
@pytest.mark.parametrize("max_tokens", [None, 0, 1, 2])
def test_c07_prompts_at_the_end_of_the_context(length, max_tokens):
    engine = make_engine(max_model_len=64)
    expected = {63: {None: 1, 0: 0, 1: 1, 2: 1}, 64: {0: 0}}.get(length, {}).get(max_tokens)
    if expected is None:
        with pytest.raises(InvalidRequestError, match="context holds 64") as caught:
            add(engine, prompt=[1] * length, max_tokens=max_tokens)
        assert caught.value.code == "context_length_exceeded"
    else:
        output = run(engine, prompt=[1] * length, max_tokens=max_tokens)
        assert len(output.token_ids) == expected
        assert output.finish_reason == "length"
    assert run(engine, max_tokens=2).token_ids == expected_tokens(PROMPT, 2)


def test_c08_a_prompt_that_never_fits_the_pool_is_refused_and_others_run():
    engine = make_engine(num_pages=8, page_size=4, max_model_len=128)
    with pytest.raises(InvalidRequestError, match="pool holds 28") as caught:
        add(engine, "big", [1] * 40, max_tokens=1)
    assert caught.value.code == "kv_cache_exceeded"
    for name in ("x", "y", "z"):
        add(engine, name, [1, 2, 3, 4], max_tokens=4)
    assert set(drain(engine)) == {"x", "y", "z"}


def test_c08_a_request_that_outgrows_the_pool_ends_with_length():
    engine = make_engine(num_pages=8, page_size=4, max_model_len=128)
    output = run(engine, prompt=[1] * 20, max_tokens=100)
    assert output.finish_reason == "length"
    assert output.token_ids == expected_tokens([1] * 20, 28 - 20 + 1)
    assert engine.stats().num_steps < 200
    assert engine.stats().num_preemptions == 0


def test_ids_may_be_numpy_integers():
    engine = make_engine()
    assert run(engine, prompt=np.array(PROMPT), max_tokens=3).token_ids == expected_tokens(
        PROMPT, 3
    )


def test_the_end_set_and_stop_token_ids():
    """ignore_eos switches off exactly the end set, never the request's own ids."""
    ids = expected_tokens(PROMPT, 8)
    assert len(set(ids)) == 8
    engine = make_engine(eos_token_ids=[ids[4], ids[6]])
    ended = run(engine, max_tokens=8, ignore_eos=False)
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (ids[:5], "stop", None)
    assert run(engine, max_tokens=8).token_ids == ids
    own = run(engine, max_tokens=8, stop_token_ids=[ids[2]])
    assert (own.token_ids, own.finish_reason, own.stop_reason) == (ids[:3], "stop", ids[2])


def test_logprobs_come_only_when_asked_for():
    engine = make_engine()
    assert run(engine, max_tokens=3).logprobs is None
    for asked in (True, 0, 1):
        assert run(engine, max_tokens=3, logprobs=asked).logprobs == [-1.0] * 3
    assert run(engine, max_tokens=0, logprobs=True).logprobs == []


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(InvalidRequestError, match="need a tokenizer") as caught:
        add(make_engine(), stop=["x"])
    assert caught.value.param == "stop"


def test_an_id_in_flight_is_refused_and_free_again_later():
    engine = make_engine()
    add(engine, max_tokens=2)
    with pytest.raises(InvalidRequestError, match="already in flight"):
        add(engine, max_tokens=2)
    drain(engine)
    assert run(engine, max_tokens=2).token_ids == expected_tokens(PROMPT, 2)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_abort_returns_the_pages_at_once(num_steps):
    engine = make_engine(max_num_batched_tokens=8)
    add(engine, prompt=list(range(20)), max_tokens=9)
    for _ in range(num_steps):
        engine.step()
    output = engine.abort("a")
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert not engine.has_work()
    engine.check_invariants()
    assert engine.abort("a") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", None),
        ("id", 7),
        ("sampling_params", None),
        ("sampling_params", {"n": 1}),
        ("priority", 1.5),
        ("priority", 2**31),
        ("priority", True),
        ("cache_salt", ""),
        ("cache_salt", b"x"),
        ("cache_salt", "x" * 1025),  # each is kept beside what was cached under it
        ("cache_salt", CacheSalt("request", "")),
        ("cache_salt", CacheSalt("", "x")),
        ("cache_salt", CacheSalt([], "x")),  # no cache could be asked for its pages
        ("hold", 1),
        ("beam", {"beam_width": 2}),
    ],
)
def test_a_bad_request_field_is_named(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        Request(**({"id": "a", "prompt_token_ids": PROMPT} | {name: value}))
    assert caught.value.param == name
    assert name in caught.value.message
    assert caught.value.message.endswith(f"got {shown(value)}")


def test_a_bad_salt_is_shown_as_it_was_given():
    for value in ("", 7):
        with pytest.raises(InvalidRequestError) as caught:
            Request(id="a", prompt_token_ids=PROMPT, cache_salt=value)  # type: ignore[arg-type]
        wanted = "cache_salt must be a text of 1 to 1024 characters"
        assert caught.value.message == f"{wanted}, got {value!r}"


def test_values_in_messages_are_cut():
    assert shown("x" * 1000) == "'" + "x" * 99 + "..."
    assert shown(-(10**5000)) == "an integer of 16610 bits"
    assert shown(1.5) == "1.5"


@pytest.mark.parametrize(
    "value",
    [
        [], (), {}, [1], (1,), (1, 2), {"a": [1, "b", {"c": None}]}, "x'y", b"ab", True, [[1] * 3] * 50,
        {"k" * 300: 1}, [["x" * 90], {"y": 1.5}], {1: 2, "b": (3,)},
    ],
)  # fmt: skip
def test_a_shown_value_is_the_beginning_of_its_repr(value):
    text = repr(value)
    assert shown(value) == (text if len(text) <= 100 else text[:100] + "...")


def test_no_more_of_a_value_is_read_than_is_shown():
    num_read = 0

    class Probe:
        def __repr__(self):
            nonlocal num_read
            num_read += 1
            return "7"

    assert shown([[Probe()] * 1000] * 1000).startswith("[[7, 7, 7")
    assert shown({i: Probe() for i in range(1000)}).startswith("{0: 7, 1: 7")
    assert num_read < 100


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float16"),
        ("max_model_len", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", "many"),
        ("page_size", 3),
        ("page_size", 24),
        ("num_pages", 1),
        ("kv_cache_gib", 0),
        ("kv_cache_gib", math.nan),
        ("memory_utilization", 1.5),
        ("seed", -1),
        ("scheduling", "sometimes"),
        ("max_batch", 4),
    ],
)
def test_a_bad_option_is_named(name, value):
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_options({name: value})


def test_derived_seeds_are_fixed():
    """Resuming a file draws the same numbers, on any machine and in any version."""
    assert derive_seed(0, 0) == derive_seed(0, 0)
    assert len({derive_seed(s, i) for s in range(3) for i in range(100)}) == 300
    assert derive_seed(0, 1) == 0xF227960998E4764C
    choices = {choice_seed(s, i) for s in range(3) for i in range(1, 100)}
    assert len(choices) == 297
    assert choices.isdisjoint(derive_seed(s, i) for s in range(3) for i in range(100))
    assert choice_seed(7, 0) == 7


def test_the_prefix_cache_is_reset_between_two_steps():
    engine = make_engine(async_scheduling=True)
    prompt = list(range(1, 30))
    engine.add(
        Request(
            id="a",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=4, temperature=0),
        )
    )
    drain(engine)
    params = SamplingParams(max_tokens=30, temperature=0)
    engine.add(Request(id="b", prompt_token_ids=prompt, sampling_params=params))
    parts = engine.step() + engine.step()
    assert parts[0].num_cached_tokens == 28
    num_cached = engine.stats().num_cached_pages
    assert engine.reset_prefix_cache() == num_cached
    engine.check_invariants()
    assert engine.stats().num_cached_pages == 0
    rest = drain(engine)["b"]
    ids = [i for part in [*parts, *rest] for i in part.outputs[0].token_ids]
    assert ids == expected_tokens(prompt, 30)
    assert engine.reset_prefix_cache() > 0
    engine.add(Request(id="c", prompt_token_ids=prompt, sampling_params=params))
    assert drain(engine)["c"][0].num_cached_tokens == 0
