"""C21, C22, C23: log probabilities in both layouts."""

import asyncio
import itertools
import math

import pytest

from jaxserve.request import CompletionOutput, PromptLogprob
from jaxserve.server.openai.logprobs import (
    TokenNames,
    TokenReader,
    chat_layout,
    completion_layout,
    prompt_layout,
)
from jaxserve.text.tokenizer import Tokenizer
from tests.llms import TINY
from tests.server.conftest import serving
from tests.server.fake_client import FakeEngineClient
from tests.server.replies import check_schema, error_of, events_of, joined_completion, strict_json

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = " Olá 🙂 end 👩‍🚀."


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_directory(TINY)


def _run(check, **options):
    async def main():
        client = FakeEngineClient(**options)
        async with serving(client) as http:
            return await check(http, client)

    return asyncio.run(main())


async def _chat(http, **body):
    reply = await http.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 60} | body
    )
    assert reply.status_code == 200, reply.text
    body = strict_json(reply.content)
    check_schema("CreateChatCompletionResponse", body)
    return body["choices"][0]


async def _complete(http, **body):
    reply = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 60} | body)
    assert reply.status_code == 200, reply.text
    return strict_json(reply.content)["choices"][0]


def test_c21_chat_layout():
    async def check(http, client):
        choice = await _chat(http, logprobs=True)
        content = choice["logprobs"]["content"]
        assert all(one["top_logprobs"] == [] for one in content)
        data = b"".join(bytes(one["bytes"]) for one in content if one["bytes"] is not None)
        assert data.decode() == choice["message"]["content"] == TEXT
        # The end token put nothing into the text.
        assert (content[-1]["token"], content[-1]["bytes"]) == ("<|im_end|>", None)
        assert any(one["token"].startswith("bytes:\\x") for one in content)
        kept = await _chat(http, logprobs=True, skip_special_tokens=False)
        assert kept["message"]["content"] == TEXT  # of which the end token is no part either
        assert kept["logprobs"] == choice["logprobs"]

        content = (await _chat(http, logprobs=True, top_logprobs=3))["logprobs"]["content"]
        for one in content:
            values = [top["logprob"] for top in one["top_logprobs"]]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
        for body in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}):
            assert (await _chat(http, **body))["logprobs"] is None

    _run(check, script=TEXT)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
    ],
)
def test_c21_chat_refuses(fields, param):
    async def check(http, client):
        reply = await http.post("/v1/chat/completions", json={"messages": MESSAGES} | fields)
        assert reply.status_code == 400
        assert error_of(reply)["param"] == param

    _run(check)


def test_c21_completions_layout():
    async def check(http, client):
        assert (await _complete(http))["logprobs"] is None
        assert (await _complete(http, logprobs=None))["logprobs"] is None
        for num_top in (0, 2):
            choice = await _complete(http, logprobs=num_top)
            found = choice["logprobs"]
            assert "".join(found["tokens"]) == choice["text"] == TEXT
            assert found["text_offset"] == [
                len("".join(found["tokens"][:i])) for i in range(len(found["tokens"]))
            ]
            lengths = {len(values) for values in found.values()}
            assert len(lengths) == 1
            for chosen, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
                values = list(top.values())
                assert len(values) == max(num_top, 1)
                assert values == sorted(values, reverse=True)
                assert chosen == max(values)  # to the bit: evaluation tools compare them

    _run(check, script=TEXT)


def test_c21_a_chosen_token_outside_the_top_has_its_logprob(tokenizer):
    names = TokenNames(tokenizer)
    reader = TokenReader(names, skip_special_tokens=True)
    (a, b, c) = (tokenizer.encode(text)[0] for text in ("a", "b", "c"))
    output = CompletionOutput(0, "a", [a], [-5.0], "length", None, None, [[(b, -0.5), (c, -1.0)]])
    entries = reader.feed_output(output)
    layout = completion_layout(entries, names, 2)
    assert layout["top_logprobs"] == [{"b": -0.5, "c": -1.0, "a": -5.0}]
    (one,) = chat_layout(entries, names, 2)
    assert one["logprob"] == -5.0
    assert [top["token"] for top in one["top_logprobs"]] == ["b", "c"]


def test_c22_nothing_that_is_no_number_reaches_the_json(tokenizer):
    names = TokenNames(tokenizer)
    reader = TokenReader(names, skip_special_tokens=True)
    (a, b) = (tokenizer.encode(text)[0] for text in "ab")
    top = [(a, -0.0), (b, -math.inf)]
    entries = reader.feed_output(
        CompletionOutput(0, "a", [a], [-math.inf], None, None, None, [top])
    )
    assert completion_layout(entries, names, 2)["token_logprobs"] == [-9999.0]
    assert completion_layout(entries, names, 2)["top_logprobs"] == [{"a": -9999.0, "b": -9999.0}]
    (one,) = chat_layout(entries, names, 2)
    assert one["logprob"] == -9999.0
    assert one["top_logprobs"][1]["logprob"] == -9999.0
    ranked = prompt_layout([None, PromptLogprob(-math.inf, [(a, -1.0)], 512)], [a, b], names)
    assert ranked == [
        None,
        {
            str(a): {"logprob": -1.0, "rank": 1, "decoded_token": "a"},
            str(b): {"logprob": -9999.0, "rank": 512, "decoded_token": "b"},
        },
    ]


def test_tokens_that_look_the_same_are_all_there(tokenizer):
    """The first token of a text loses its space with some decoders."""
    names = TokenNames(tokenizer)
    reader = TokenReader(names, skip_special_tokens=True)
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    (entry,) = reader.feed([(a, -1.0, [(b, -0.5), (a, -1.0)])], "b", is_last=True)
    layout = completion_layout([entry], names, 2)
    assert layout["top_logprobs"] == [{f"token_id:{b}": -0.5, "b": -1.0}]


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("prompt", ["\n1. Ana has 20", "Olá 🙂🙂", "<|im_start|>x"])
def test_c23_echo_with_logprobs(prompt, max_tokens):
    async def check(http, client):
        fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        choice = await _complete(http, **fields)
        found = choice["logprobs"]
        num_prompt = len(client.tokenizer.encode(prompt))
        shown = client.tokenizer.decode(client.tokenizer.encode(prompt))
        assert choice["text"].startswith(shown)
        assert "".join(found["tokens"]) == choice["text"]
        assert found["text_offset"] == [
            len("".join(found["tokens"][:i])) for i in range(len(found["tokens"]))
        ]
        assert {len(values) for values in found.values()} == {num_prompt + max_tokens}
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None

        scored = await _complete(http, prompt=prompt, prompt_logprobs=1, max_tokens=0)
        ids = client.tokenizer.encode(prompt)
        entries = scored["prompt_logprobs"]
        values = [e[str(i)]["logprob"] for i, e in zip(ids[1:], entries[1:], strict=True)]
        assert found["token_logprobs"][1:num_prompt] == values
        assert entries[0] is None

        events = events_of(await http.post("/v1/completions", json=fields | {"stream": True}))
        (streamed,) = joined_completion(events)
        assert streamed == choice
        assert "prompt_logprobs" not in choice  # asked for by echo alone

    _run(check, script=" ok, ñ!")


def test_entries_do_not_depend_on_how_the_output_is_cut(tokenizer):
    """Held text comes before its token; a stop string cuts the last one."""
    names = TokenNames(tokenizer)
    ids = tokenizer.encode("ab🙂 end")
    text = "ab🙂 en"  # "d" was cut off
    logprobs = [-float(i) for i in range(len(ids))]

    def read(cuts):
        reader = TokenReader(names, skip_special_tokens=True)
        entries = []
        for (num_ids, num_chars), (more_ids, more_chars) in itertools.pairwise(cuts):
            output = CompletionOutput(
                0, text[num_chars:more_chars], ids[num_ids:more_ids], logprobs[num_ids:more_ids]
            )
            if (more_ids, more_chars) == (len(ids), len(text)):
                output.finish_reason, output.stop_reason = "stop", "d"
            entries += reader.feed_output(output)
        return entries

    end = (len(ids), len(text))
    whole = read([(0, 0), end])
    assert "".join(one.text for one in whole) == text
    assert b"".join(one.data for one in whole).decode().startswith(text)
    assert [one.logprob for one in whole] == logprobs
    assert read([(0, 0), (0, 1), (1, 1), (2, 2), (3, 2), (6, 3), end]) == whole
    assert read([(0, 0), (2, 3), (6, 6), end]) == whole


def test_without_a_tokenizer_ids_are_names():
    names = TokenNames(None)
    reader = TokenReader(names, skip_special_tokens=True)
    entries = reader.feed_output(CompletionOutput(0, "", [5, 6], [-1.0, -2.0]))
    assert completion_layout(entries, names, 0) == {
        "tokens": ["token_id:5", "token_id:6"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"token_id:5": -1.0}, {"token_id:6": -2.0}],
        "text_offset": [0, 0],
    }
