"""What is sent has the lengths, the prefixes and the fields that were asked for."""

import asyncio
import json

import numpy as np
import pytest

from jaxserve.server.load.client import LoadClient, Target
from jaxserve.server.load.datasets import (
    DatasetError,
    Lengths,
    as_texts,
    drawn_prompts,
    drawn_requests,
    file_requests,
    repeated,
    vocabulary,
)
from tests.server.load.sse_server import SseServer, serving

IDS = [5, 6, 7, 8]


def draw(count: int, seed: int = 0, **lengths: float) -> list[tuple[list[int], int]]:
    return drawn_prompts(np.random.default_rng(seed), count, Lengths(**lengths), IDS)  # type: ignore[arg-type]


def test_lengths_are_exact_without_a_range():
    prompts = draw(20, input_len=9, output_len=3)
    assert {(len(ids), output_len) for ids, output_len in prompts} == {(9, 3)}
    assert {i for ids, _ in prompts for i in ids} == set(IDS)
    assert len({tuple(ids) for ids, _ in prompts}) == 20


def test_a_range_is_filled_and_not_left():
    prompts = draw(2000, input_len=20, output_len=10, range_ratio=0.5)
    assert {len(ids) for ids, _ in prompts} == set(range(10, 31))
    assert {output_len for _, output_len in prompts} == set(range(5, 16))
    assert {len(ids) for ids, _ in draw(200, input_len=1, range_ratio=0.9)} == {1, 2}


def test_prefixes_are_shared_and_mixed():
    prompts = draw(40, input_len=5, prefix_len=16, num_prefixes=4)
    order = [tuple(ids[:16]) for ids, _ in prompts]
    assert [order.count(one) for one in set(order)] == [10] * 4
    assert order != [order[i % 4] for i in range(40)]
    assert {len(ids) for ids, _ in prompts} == {21}


def test_a_seed_names_the_prompts():
    assert draw(3) == draw(3) != draw(3, seed=1)


def test_drawn_requests():
    (request,) = drawn_requests([([5, 6], 3)], is_chat=False)
    assert request.num_prompt_tokens == 2
    assert request.body == {
        "prompt": [5, 6],
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
    }
    (chat,) = drawn_requests([("hi", 3)], is_chat=True, ignore_eos=False)
    assert chat.num_prompt_tokens is None
    assert chat.body["messages"] == [{"role": "user", "content": "hi"}]
    assert "ignore_eos" not in chat.body


def lines(*objects: object) -> list[bytes]:
    return [json.dumps(one).encode() for one in objects]


def test_lines_are_sent_as_they_are():
    found = file_requests(
        [
            *lines({"id": "a", "prompt": "x", "prompt_token_ids": [1, 2], "top_k": 4}),
            b"  ",
            *lines({"prompt": [1, 2, 3], "max_tokens": 9, "model": "n", "stream": False}),
        ],
        is_chat=False,
        defaults={"max_tokens": 5},
    )
    assert found[0].body == {"prompt": [1, 2], "top_k": 4, "max_tokens": 5}
    assert found[0].num_prompt_tokens == 2
    assert found[1].body == {"prompt": [1, 2, 3], "max_tokens": 9}
    messages = [{"role": "system", "content": "s"}]
    chats = file_requests(lines({"prompt": "x"}, {"messages": messages}), is_chat=True)
    assert chats[0].body == {"messages": [{"role": "user", "content": "x"}]}
    assert chats[1].body == {"messages": messages}


@pytest.mark.parametrize(
    ("content", "is_chat", "words"),
    [
        ([], False, "holds no requests"),
        ([b"{"], False, "line 1: not JSON"),
        ([b'{"prompt": "x"}', b"[]"], False, "line 2: not a JSON object"),
        ([b'{"messages": []}'], False, "line 1: needs a prompt"),
        ([b'{"prompt": [1]}'], True, "line 1: a chat needs messages"),
        ([b'{"a": ' + b"[" * 100_000], False, "line 1: not JSON"),
    ],
)
def test_bad_lines_are_named(content, is_chat, words):
    with pytest.raises(DatasetError, match=words):
        file_requests(content, is_chat=is_chat)


def test_few_requests_serve_for_many():
    (a, b) = file_requests(lines({"prompt": "a"}, {"prompt": "b"}), is_chat=False)
    assert repeated([a, b], 5) == [a, b, a, b, a]
    assert repeated([a, b], 1) == [a]
    assert repeated([a, b], None) == [a, b]


def ask(server: SseServer, function):
    async def run(url: str):
        client = LoadClient(Target(base_url=url, model="m"))
        try:
            return await function(client)
        finally:
            await client.close()

    with serving(server) as url:
        return asyncio.run(run(url))


def test_the_server_makes_tokens_and_texts():
    assert ask(SseServer(), vocabulary) == [5, 6, 7, 8]
    texts = ask(SseServer(), lambda client: as_texts(client, [([5, 6], 3)]))
    assert texts == [("say 2 w5 w6", 3)]


def test_a_server_without_a_tokenizer_is_named():
    server = SseServer(has_tokenizer=False)
    for function in (vocabulary, lambda client: as_texts(client, [([5], 3)])):
        with pytest.raises(DatasetError, match=r"tokenize .*status 404.*--dataset=jsonl"):
            ask(server, function)
