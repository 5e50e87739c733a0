"""/tokenize and /detokenize: the ids that a completion would get, and their text."""

import asyncio
import threading

import pytest

from jaxserve.server.encoder import Encoder
from jaxserve.server.errors import ApiError
from jaxserve.server.state import MAX_SIDE_WAITING
from jaxserve.server.tokenize import MAX_DETOKENIZED, MAX_TOKENIZED
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


def test_a_text_for_tokens_is_bounded():
    text = "a b " * (MAX_TOKENIZED // 4)
    status, reply = ask("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    status, reply = ask("/tokenize", {"prompt": text + "a"})
    assert (status, reply["error"]["param"]) == (400, "prompt")


def test_tokens_for_a_text_are_bounded():
    """Two bytes of a body may stand for a text of a hundred."""
    assert ask("/detokenize", {"tokens": [5] * MAX_DETOKENIZED})[0] == 200
    status, reply = ask("/detokenize", {"tokens": [5] * (MAX_DETOKENIZED + 1)})
    assert (status, reply["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize("url", ["/tokenize", "/detokenize"])
def test_who_wants_tokens_alone_waits_for_a_thread_of_his_own(url):
    body = {"prompt": "hi"} if url == "/tokenize" else {"tokens": [5]}

    async def check():
        async with serving() as http:
            side, opened = http.state.side_encoder, threading.Event()
            waiting = asyncio.gather(*(side.run(opened.wait) for _ in range(MAX_SIDE_WAITING + 1)))
            await asyncio.sleep(0)
            generated = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
            assert generated.status_code == 200
            refused = await http.post(url, json=body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            opened.set()
            await waiting
            assert (await http.post(url, json=body)).status_code == 200

    asyncio.run(check())


def test_who_left_is_counted_until_his_turn_is_over():
    async def check():
        encoder, opened = Encoder(1, max_waiting=1), threading.Event()
        first = asyncio.ensure_future(encoder.run(opened.wait))
        await asyncio.sleep(0)
        first.cancel()
        second = asyncio.ensure_future(encoder.run(int))
        await asyncio.sleep(0)
        with pytest.raises(ApiError):  # the thread is still at what the first one wanted
            await encoder.run(int)
        opened.set()
        assert await second == 0
        assert await encoder.run(int) == 0
        encoder.shutdown()

    asyncio.run(check())


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
