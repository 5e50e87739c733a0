import asyncio
import json
import logging

import pytest

from jaxserve.sampling_params import SamplingParams
from jaxserve.server.config import key_digest
from jaxserve.server.openai.completions import DEFAULT_MAX_TOKENS, FIELDS, parse
from jaxserve.server.openai.endpoint import Endpoint
from tests.server.conftest import serving
from tests.server.fake_client import FakeEngineClient
from tests.server.replies import check_schema, error_of, events_of, joined_completion, strict_json

URL = "/v1/completions"
SCRIPT = "hello Olá 🙂 end"


async def _post(http, **body):
    reply = await http.post(URL, json={"max_tokens": 12} | body)
    assert reply.status_code == 200, reply.text
    return strict_json(reply.content)


def _run(check, client=None, **settings):
    async def main():
        made = client() if client else FakeEngineClient()
        async with serving(made, **settings) as http:
            return await check(http, made)

    return asyncio.run(main())


def test_reply_is_what_openai_describes():
    async def check(http, client):
        body = await _post(http, prompt="hi", max_tokens=30)
        check_schema("CreateCompletionResponse", body)
        assert body["choices"] == [
            {
                "index": 0,
                "text": SCRIPT,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        assert body["id"].startswith("cmpl-")
        assert body["model"] == "fake"
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        body = await _post(http, prompt="hi", logprobs=3, n=2)
        check_schema("CreateCompletionResponse", body)

    _run(check, lambda: FakeEngineClient(SCRIPT))


def test_every_shape_of_prompts_and_their_order():
    async def check(http, client):
        ids = {text: client.tokenizer.encode(text) for text in ("one", "two")}
        alone = {}
        for text in ids:
            body = await _post(http, prompt=text, temperature=0)
            alone[text] = body["choices"][0]["text"]
        assert alone["one"] != alone["two"]
        for prompt in (["one", "two"], [ids["one"], ids["two"]]):
            body = await _post(http, prompt=prompt, n=2, temperature=0)
            choices = body["choices"]
            assert [one["index"] for one in choices] == [0, 1, 2, 3]
            assert [one["text"] for one in choices] == [alone["one"]] * 2 + [alone["two"]] * 2
            assert body["usage"]["completion_tokens"] == 48
            assert body["usage"]["prompt_tokens"] == sum(map(len, ids.values()))
            check_schema("CreateCompletionResponse", body)
        for prompt in (ids["one"], [ids["one"]], ["one"]):
            body = await _post(http, prompt=prompt, temperature=0)
            assert body["choices"][0]["text"] == alone["one"]

    _run(check)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3, "seed": 7},
        {"prompt": ["one", "two", "three"], "n": 2},
        {"logprobs": 0},
        {"logprobs": 4, "echo": True, "n": 2},
        {"logprobs": 2, "stop": ["4", "9"], "ignore_eos": True},
        {"stop": ["e"], "include_stop_str_in_output": True, "logprobs": 1},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"echo": True, "return_token_ids": True, "prompt_logprobs": 2},
        {"logprobs": 2, "return_tokens_as_token_ids": True, "skip_special_tokens": False},
    ],
)
@pytest.mark.parametrize("script", [None, "ab Olá 🙂👩‍🚀 \x85 \u2028 end of it"])
def test_stream_and_whole_are_equal(more, script):
    async def check(http, client):
        fields = {"prompt": "Olá", "temperature": 0, "max_tokens": 25} | more
        whole = await _post(http, **fields)
        client.engine.scheduler.kv.clear_cache()
        options = {"include_usage": True}
        reply = await http.post(URL, json=fields | {"stream": True, "stream_options": options})
        events = events_of(reply)
        assert joined_completion(events) == whole["choices"]
        assert events[-1]["usage"] == whole["usage"]
        assert events[-1]["choices"] == []
        assert all(event["usage"] is None for event in events[:-1])
        assert len({(e["id"], e["created"], e["model"]) for e in events}) == 1

    _run(check, lambda: FakeEngineClient(script))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["ok", ""]}, "prompt[1]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True, 1]}, "prompt"),
        ({"prompt": [1, 2**31]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt[1]"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": ["a"] * 3000}, "n"),
        ({"prompt": "\ud800"}, None),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"suffix": "tail"}, "suffix"),
        ({"echo": "yes"}, "echo"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"seed": 0.5}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        ({"priority": "high"}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"model": 5}, "model"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_what_is_wrong_is_named(fields, param):
    async def check(http, client):
        body = json.dumps({"prompt": "hi"} | fields)
        reply = await http.post(URL, content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400, reply.text
        error = error_of(reply)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert (await _post(http, prompt="hi"))["choices"][0]["finish_reason"] == "length"

    _run(check)


def test_null_is_absent():
    async def check(http, client):
        plain = await _post(http, prompt="hi", temperature=None)
        nulls = {name: None for name in FIELDS if name not in ("prompt", "max_tokens")}
        same = await _post(http, prompt="hi", **nulls)
        assert same["choices"] == plain["choices"]
        first, second = client.requests
        assert first.sampling_params == second.sampling_params
        body = {"prompt": "hi", "max_tokens": None}
        reply = await http.post(URL, json=body)
        assert reply.json()["usage"]["completion_tokens"] == DEFAULT_MAX_TOKENS

    _run(check, lambda: FakeEngineClient(seed=3))


def test_unknown_fields_are_said_once_and_ignored(caplog):
    async def check(http, client):
        with caplog.at_level(logging.WARNING, "jaxserve.server"):
            for _ in range(2):
                await _post(http, prompt="hi", max_token=3, user=5, metadata="x", store=[])
        said = [one.getMessage() for one in caplog.records]
        assert len(said) == 1
        assert "'max_token'" in said[0]
        assert "did you mean 'max_tokens'" in said[0]

    _run(check)


def test_defaults_of_the_checkpoint_fill_what_is_absent():
    defaults = SamplingParams(temperature=0.25, top_k=7, max_tokens=3)

    async def check(http, client):
        await http.post(URL, json={"prompt": "hi", "top_k": None, "temperature": 0.5})
        params = client.requests[0].sampling_params
        assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 7, 3)

    _run(check, lambda: FakeEngineClient(defaults=defaults))


def test_every_sampling_field_arrives():
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "seed": 11,
        "n": 2,
        "stop": "zz",
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "bad_words": ["bad"],
        "allowed_token_ids": list(range(3, 300)),
        "prompt_logprobs": 1,
        "processed_logprobs": True,
        "skip_special_tokens": False,
    }

    async def check(http, client):
        served = Endpoint(http.state, parse).served  # not all of them mean something to a fake
        call = parse(
            {"prompt": "hi", "logit_bias": {"5": -100}, "priority": 3, "logprobs": 2} | fields,
            served,
        )
        wanted = SamplingParams(logit_bias={5: -100}, logprobs=2, **fields)
        assert call.params == wanted
        (request,) = call.requests([[1, 2]], "salt")
        assert (request.priority, request.cache_salt) == (3, ("request", "salt"))

    _run(check)


def test_models_by_name():
    async def check(http, client):
        for name in ("a", "b", None):
            body = await _post(http, prompt="hi", model=name)
            assert body["model"] == (name or "a")
        reply = await http.post(URL, json={"prompt": "hi", "model": "gpt-4"})
        assert reply.status_code == 404
        assert error_of(reply)["code"] == "model_not_found"

    _run(check, served_model_names=("a", "b"))


KEYS = (key_digest("first-key"), key_digest("second-key"))


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [
        ({}, True),
        ({"api_key_digests": KEYS[:1]}, True),
        ({"api_key_digests": KEYS}, False),
        ({"api_key_digests": KEYS, "enable_prompt_tokens_details": True}, True),
    ],
)
def test_cached_tokens_are_told_to_others_only_where_the_operator_says_so(settings, is_told):
    async def check(http, client):
        http.headers["Authorization"] = "Bearer first-key"
        prompt = list(range(3, 23))
        usages = [(await _post(http, prompt=prompt))["usage"] for _ in range(2)]
        if not is_told:
            assert all("prompt_tokens_details" not in one for one in usages)
            return
        first, second = [one["prompt_tokens_details"]["cached_tokens"] for one in usages]
        assert first == 0
        assert 16 <= second < 20

    _run(check, **settings)


def test_too_long_a_prompt_is_refused_before_a_page_is_taken():
    async def check(http, client):
        reply = await http.post(URL, json={"prompt": [5] * 600})
        assert reply.status_code == 400
        assert error_of(reply)["code"] == "context_length_exceeded"
        # In a stream too it has a status, and it takes its neighbours with it.
        reply = await http.post(URL, json={"prompt": [[5], [5] * 600], "stream": True})
        assert reply.status_code == 400

    _run(check)
