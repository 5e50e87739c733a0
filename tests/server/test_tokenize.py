"""/tokenize and /detokenize: the ids that a completion would get, and their text."""

import asyncio

import pytest

from jaxserve.text.tokenizer import Tokenizer
from tests.llms import TINY
from tests.server.conftest import serving

TOKENIZER = Tokenizer.from_directory(TINY)
MESSAGES = [{"role": "user", "content": "hello"}]


def ask(url: str, body: object, **settings: object) -> tuple[int, dict]:
    async def call():
        async with serving(**settings) as http:
            reply = await http.post(url, json=body)
            return reply.status_code, reply.json()

    return asyncio.run(call())


def test_a_prompt():
    status, reply = ask("/tokenize", {"prompt": "héllo, 日本", "return_token_strs": True})
    assert status == 200
    assert reply["tokens"] == TOKENIZER.encode("héllo, 日本")
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 512
    assert ask("/tokenize", {"prompt": "hi"})[1]["token_strs"] is None


def test_an_empty_prompt_has_no_tokens_of_its_own():
    assert ask("/tokenize", {"prompt": "", "add_special_tokens": False})[1]["tokens"] == []


def test_messages_are_rendered_as_for_a_chat():
    status, reply = ask("/tokenize", {"messages": MESSAGES})
    assert status == 200
    assert reply["tokens"] == TOKENIZER.encode_chat(MESSAGES)
    shorter = ask("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})[1]
    assert shorter["tokens"] == TOKENIZER.encode_chat(MESSAGES, False)
    assert shorter["count"] < reply["count"]


def test_the_operators_chat_template_is_used():
    template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    _, reply = ask("/tokenize", {"messages": MESSAGES}, chat_template=template)
    assert TOKENIZER.decode(reply["tokens"]) == "[hello]"


def test_there_and_back():
    for text in ("hello world", "Olá 🙂 日本", "a\n\tb  c"):
        ids = ask("/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"]
        assert ask("/detokenize", {"tokens": ids}) == (200, {"prompt": text})
    assert ask("/detokenize", {"tokens": []}) == (200, {"prompt": ""})


def test_what_is_told_of_the_tokenizer():
    async def check():
        async with serving() as http:
            return (await http.get("/tokenizer_info")).json()

    told = asyncio.run(check())
    assert told["eos_token"] == "<|im_end|>"
    assert ask("/tokenize", {"prompt": told["eos_token"]})[1]["tokens"] == [
        *TOKENIZER.eos_token_ids
    ]
    assert told["chat_template"] == TOKENIZER.chat_template
    assert told["vocab_size"] == TOKENIZER.vocab_size


@pytest.mark.parametrize(
    ("url", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_special_tokens": True},
            400,
            "add_special_tokens",
        ),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 7*7 }}"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "1 2"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, 1000]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": ["fake"]}, 400, "model"),
    ],
)
def test_what_is_refused_is_named(url, body, status, param):
    got, reply = ask(url, body)
    assert got == status
    assert reply["error"]["param"] == param
    assert reply["error"]["type"] == "invalid_request_error"
