"""Commands and events as bytes and back; nothing else is read."""

import json
import string
from dataclasses import fields

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.async_engine.commands import (
    AbortRequest,
    AddRequest,
    Answer,
    Ended,
    NotStarted,
    Query,
    Refused,
    Released,
    Started,
    Stop,
)
from jaxserve.async_engine.messages import KINDS, Settings, decode, encode
from jaxserve.async_engine.report import ReportCollector
from jaxserve.errors import InvalidRequestError
from jaxserve.request import (
    CacheSalt,
    CompletionOutput,
    PromptLogprob,
    Request,
    RequestOutput,
    RequestTimes,
)
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.text.tokenizer import Tokenizer
from tests.async_engine.clients import greedy_request
from tests.async_engine.fake_served import serve_fake
from tests.fakes import drain, make_engine
from tests.llms import TINY

OUTPUT = RequestOutput(
    "a",
    [
        CompletionOutput(0, "é\0x", [1, 2**31 - 1], [-0.1, -9999.0], "stop", "END", None),
        CompletionOutput(3, "", [], None, "stop", 17, -0.25, [[(1, -0.5)], []]),
    ],
    num_prompt_tokens=4,
    num_cached_tokens=2,
    finished=True,
    prompt_logprobs=[None, PromptLogprob(-1.5, [(3, -0.25)], 2)],
    times=RequestTimes(1.25, 2.5, None, None),
)
MESSAGES = [
    Settings("model", "auto", {"max_num_seqs": 4, "dtype": "auto", "seed": None}, 20),
    AddRequest(greedy_request("a", (1, 2, 3))),
    AbortRequest("a"),
    Query(number=3, kind="report", since_step=7, with_pages=True),
    Stop(2.5),
    NotStarted("ConfigError", "why"),
    Released([OUTPUT]),
    Released([]),
    Refused("a", "why", "prompt", "context_length_exceeded", True),
    Answer(number=4, error="no"),
    Ended(None),
    Ended("why"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_there_and_back(message):
    data = encode(message)
    again = decode(data)
    assert again == message
    assert type(again) is type(message)
    assert encode(again) == data
    if isinstance(again, Released) and again.outputs:
        assert again.outputs[0].times == OUTPUT.times
        assert isinstance(again.outputs[0].prompt_logprobs[1], PromptLogprob)


def test_stats_and_reports_there_and_back():
    engine = make_engine()
    collector = ReportCollector(engine)
    engine.add(greedy_request("a", list(range(1, 30))))
    drain(engine)
    answer = Answer(number=1, stats=engine.stats(), report=collector.report(with_pages=True))
    again = decode(encode(answer))
    assert isinstance(again, Answer)
    assert again.stats == answer.stats
    assert again.stats.to_dict() == engine.stats().to_dict()
    assert again.report == answer.report
    assert again.report.prefixes == answer.report.prefixes != ()


TEXTS = st.text(alphabet=string.ascii_letters + "é😀 {", min_size=1, max_size=8)
IDS = st.lists(st.integers(0, 900), min_size=1, max_size=5)
FIELDS = {
    "max_tokens": st.none() | st.integers(200, 2**62),
    "min_tokens": st.integers(0, 200),
    "temperature": st.floats(0, 5) | st.integers(0, 10**300),
    "top_k": st.integers(-1, 2**31 - 1),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.integers(-2, 2),
    "repetition_penalty": st.floats(0.01, 10),
    "logit_bias": st.none()
    | st.dictionaries(st.integers(0, 900), st.floats(-100, 100), max_size=4),
    "bad_words": st.lists(TEXTS | IDS, max_size=4),
    "allowed_token_ids": st.none() | IDS,
    "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
    "stop": st.lists(TEXTS, max_size=3),
    "stop_token_ids": IDS,
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.just(False),
    "skip_special_tokens": st.booleans(),
    "logprobs": st.none() | st.booleans() | st.integers(0, 20),
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "processed_logprobs": st.booleans(),
    "echo": st.booleans(),
    "n": st.integers(1, 128),
    "structured_outputs": st.none()
    | st.fixed_dictionaries({"choice": st.lists(TEXTS, min_size=1, max_size=3)})
    | st.fixed_dictionaries({"regex": TEXTS})
    | st.just({"json": {"type": "object", "properties": {"b": {}, "a": {"const": 2**80}}}})
    | st.just({"json_object": True}),
}


def test_every_field_is_drawn():
    assert set(FIELDS) == {field.name for field in fields(SamplingParams)}


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries({}, optional=FIELDS), st.integers(-(2**31), 2**31 - 1), st.booleans())
def test_every_request_that_can_be_made_arrives_as_it_was(given_fields, priority, salted):
    request = Request(
        id="é",
        prompt_token_ids=(1, 2),
        sampling_params=SamplingParams(**given_fields),
        priority=priority,
        cache_salt=CacheSalt("api_key", "k") if salted else "mine",
        sender="é" if salted else "",
    )
    assert decode(encode(AddRequest(request))) == AddRequest(request)


@given(
    st.builds(
        BeamParams,
        beam_width=st.integers(1, 32),
        max_tokens=st.none() | st.integers(1, 10**6),
        length_penalty=st.floats(-10, 10),
        early_stopping=st.booleans() | st.just("never"),
        ignore_eos=st.booleans(),
        stop_token_ids=IDS,
        logprobs=st.none() | st.integers(0, 20),
    )
)
def test_every_search_arrives_as_it_was(beam):
    request = Request(id="a", prompt_token_ids=(1,), beam=beam)
    assert decode(encode(AddRequest(request))) == AddRequest(request)


def test_a_budget_beyond_64_bits_is_clamped():
    request = greedy_request("a", (1,), 10**30)
    again = decode(encode(AddRequest(request)))
    assert isinstance(again, AddRequest)
    assert again.request.sampling_params.max_tokens == 2**63 - 1


def test_what_has_no_bytes_is_refused():
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        encode(AddRequest(Request(id="\ud800", prompt_token_ids=[1])))


def test_a_request_that_its_own_class_refuses_is_told_so():
    bare = {"top_p": 7.0}
    data = bytes([1]) + msgspec.msgpack.encode(["a", [1], bare, None, 0, None, 0, ""])
    refused = decode(data)
    assert isinstance(refused, Refused)
    assert refused.param == "top_p"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes([len(KINDS)]),
        bytes([2]),
        bytes([2]) + msgspec.msgpack.encode({"request_id": 3}),
        bytes([2]) + msgspec.msgpack.encode({"request_id": "a"})[:-1],
        bytes([2]) + msgspec.msgpack.encode({}),
        bytes([3]) + msgspec.msgpack.encode({"number": 1, "kind": "exec"}),
        bytes([4]) + msgspec.msgpack.encode({"timeout_s": "1"}),
        bytes([1]) + msgspec.msgpack.encode(["a", ["1"], None, None, 0, None, 0, ""]),
        bytes([1]) + msgspec.msgpack.encode(["a", [1], None, None, 0, None, 0, "", 1]),
        bytes([0]) + msgspec.msgpack.encode({"model": "a", "options": {}, "x": 1}),
    ],
)
def test_nonsense_is_no_message(data):
    with pytest.raises(msgspec.DecodeError):
        decode(data)


def test_a_started_model_arrives_with_its_tokenizer():
    served = serve_fake({"tokenizer": True})
    message = decode(encode(Started(served.model)))
    model = message.to_model()  # type: ignore[union-attr]
    assert model.tokenizer is not None
    texts = {"tokenizer": None}
    assert {f.name: getattr(model, f.name) for f in fields(model)} | texts == {
        f.name: getattr(served.model, f.name) for f in fields(model)
    } | texts


def test_a_tokenizer_made_of_texts_is_the_same():
    one = Tokenizer.from_directory(TINY)
    other = Tokenizer.from_texts(one.to_texts())
    assert other.to_json() == one.to_json()
    assert json.loads(other.to_texts().tokenizer_config) == json.loads(
        one.to_texts().tokenizer_config
    )
    text = "Hello <s> wörld 😀"
    assert other.encode(text) == one.encode(text)
    chat = [{"role": "user", "content": "hi"}]
    assert other.encode_chat(chat) == one.encode_chat(chat)
    given_one = one.with_chat_template("{{ messages[0].content }}!")
    assert Tokenizer.from_texts(given_one.to_texts()).render_chat(chat) == "hi!"
