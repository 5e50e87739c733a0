"""C14, C15, C41: the life of one body, from admission to the last byte."""

import asyncio
import gc
import threading

import pytest

from jaxserve.sampling_params import SamplingParams
from jaxserve.server.openai import call as calls
from jaxserve.server.openai import endpoint
from jaxserve.server.openai.endpoint import count_sequences
from tests.server.conftest import serving
from tests.server.fake_client import FakeEngineClient
from tests.server.openai.calls import Call
from tests.server.replies import (
    check_schema,
    error_of,
    events_in,
    events_of,
    joined_chat,
    joined_completion,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 200, "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "temperature": 0},
}
BOTH = pytest.mark.parametrize("url", [COMPLETIONS, CHAT])


def _run(check, script=None, settings=None, **options):
    async def main():
        client = FakeEngineClient(script, **options)
        async with serving(client, **settings or {}) as http:
            await check(http, client)

    asyncio.run(main())


def _num_in_engine(client):
    stats = client.engine.stats()
    return stats.num_running + stats.num_waiting


async def _until_idle(client):
    """Fails where a request is still in the engine after a few turns of the loop, so without a step."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert _num_in_engine(client) == 0


@BOTH
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stop": "o"}])
def test_c41_usage_chunk_and_end_of_stream(url, more):
    join = joined_completion if url == COMPLETIONS else joined_chat

    async def check(http, client):
        body = BODIES[url] | more
        whole = (await http.post(url, json=body)).json()
        plain = events_of(await http.post(url, json=body | {"stream": True}))
        client.engine.scheduler.kv.clear_cache()  # `usage` tells what was cached
        assert all("usage" not in event and event["choices"] for event in plain)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *events, last = events_of(await http.post(url, json=body | options))
        assert all(event["usage"] is None for event in events)
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert len(events) == len(plain)
        num_choices = more.get("n", 1)
        for found in (plain, events):
            choices = [choice for event in found for choice in event["choices"]]
            ends = [one for one in choices if one["finish_reason"] is not None]
            assert sorted(one["index"] for one in ends) == list(range(num_choices))
            assert {one["finish_reason"] for one in ends} == {"stop"}
            assert len(join(found)) == num_choices
        if url == CHAT:
            for event in [*plain, *events, last]:
                check_schema("CreateChatCompletionStreamResponse", event)

    _run(check, "hello there")


@BOTH
def test_c41_usage_in_every_chunk(url):
    async def check(http, client):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = BODIES[url] | {"stream": True, "stream_options": options, "max_tokens": 5}
        events = events_of(await http.post(url, json=body))
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == 5

    _run(check)


@BOTH
def test_c41_an_error_before_the_first_token_has_a_status(url):
    async def check(http, client):
        client.running.clear()
        call = Call(http, url, BODIES[url] | {"stream": True})
        while not client.requests:
            await asyncio.sleep(0)
        client.fail("the device is gone")
        await call.task
        assert call.status == 503
        assert b'"code":"engine_dead"' in call.data
        reply = await http.post(url, json=BODIES[url])
        assert reply.status_code == 503
        assert error_of(reply)["code"] == "engine_dead"
        client.running.set()

    _run(check)


@BOTH
def test_c41_an_error_after_a_token_is_an_event(url):
    async def check(http, client):
        call = Call(http, url, BODIES[url] | {"stream": True})
        await call.until(b"data: ")
        client.running.clear()
        client.fail("the device is gone")
        await call.task
        client.running.set()
        *_, last = events_in(call.data)
        check_schema("ErrorResponse", last)
        assert last["error"]["code"] == "engine_dead"

    _run(check)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_c41_a_model_that_computes_nan(url, stream):
    prompt = list(range(40, 50))
    body = BODIES[url] | {"stream": stream}
    body |= {"prompt": prompt} if url == COMPLETIONS else {}

    async def check(http, client):
        reply = await http.post(url, json=body)
        assert reply.status_code == 500
        assert error_of(reply)["code"] == "non_finite_logits"

    _run(check, poison=prompt if url == COMPLETIONS else range(3, 500))


@BOTH
@pytest.mark.parametrize(
    "more", [{"stream": True}, {}, {"n": 4}, {"n": 4, "stream": True}, {"max_tokens": 400}]
)
@pytest.mark.parametrize("moment", ["queued", "running", "stuck"])
def test_c14_a_client_that_leaves_is_aborted_at_once(url, more, moment):
    async def check(http, client):
        if moment == "queued":
            client.running.clear()
        call = Call(http, url, BODIES[url] | {"ignore_eos": True} | more)
        while _num_in_engine(client) == 0:
            await asyncio.sleep(0)
        if moment != "queued":
            num_steps = client.engine.stats().num_steps
            while client.engine.stats().num_steps < num_steps + 3:
                await asyncio.sleep(0)
        if moment == "stuck":  # the client reads nothing any more
            call.is_read.clear()
            await asyncio.sleep(0.01)
        client.running.clear()
        call.leave()
        await call.task
        await _until_idle(client)
        assert http.state.admission.num_sequences == 0
        client.running.set()
        assert (await http.post(url, json=BODIES[url])).status_code == 200

    _run(check, num_pages=1024)


def test_c14_several_prompts_are_aborted_together():
    async def check(http, client):
        body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 300, "ignore_eos": True}
        call = Call(http, COMPLETIONS, body | {"stream": True})
        await call.until(b'"index":5')
        client.running.clear()
        call.leave()
        await call.task
        await _until_idle(client)
        client.running.set()

    _run(check, num_pages=1024)


def test_c15_equal_request_ids_of_clients_do_not_meet():
    async def check(http, client):
        headers = {"X-Request-Id": "same"}
        bodies = [BODIES[COMPLETIONS] | {"prompt": text, "max_tokens": 20} for text in ("a", "b")]
        alone = [(await http.post(COMPLETIONS, json=body)).json() for body in bodies]
        together = await asyncio.gather(
            *(http.post(COMPLETIONS, json=body, headers=headers) for body in bodies)
        )
        assert [one.json()["choices"] for one in together] == [one["choices"] for one in alone]
        assert {one.headers["x-request-id"] for one in together} == {"same"}
        assert len({one.id for one in client.requests}) == 4

    _run(check)


@BOTH
def test_slow_readers_get_all_of_it(url):
    """What waits is merged, so that a chunk may hold several tokens."""

    async def check(http, client):
        body = BODIES[url] | {"max_tokens": 50}
        whole = (await http.post(url, json=body)).json()["choices"][0]
        call = Call(http, url, body | {"stream": True})
        await call.until(b"data: ")
        call.is_read.clear()
        while _num_in_engine(client):
            await asyncio.sleep(0.001)
        call.is_read.set()
        await call.task
        events = events_in(call.data)
        assert len(events) < 50
        if url == COMPLETIONS:
            assert joined_completion(events)[0]["text"] == whole["text"]
        else:
            assert joined_chat(events)[0]["message"]["content"] == whole["message"]["content"]

    _run(check)


def test_every_choice_counts_at_the_door():
    assert count_sequences({"prompt": "a"}) == 1
    assert count_sequences({"prompt": [1, 2, 3], "n": 4}) == 4
    assert count_sequences({"prompt": ["a", "b"], "n": 4}) == 8
    assert count_sequences({"prompt": [[1], [2]], "n": "x"}) == 2
    assert count_sequences({"messages": [], "n": None}) == 1
    assert count_sequences({"prompt": ["a", "b"], "n": 4.0}) == 8  # as it is read
    assert count_sequences({"prompt": "a", "n": 1e300}) == 1  # refused later

    async def check(http, client):
        reply = await http.post(COMPLETIONS, json={"prompt": ["a"] * 7, "n": 2})
        assert reply.status_code == 400  # more than could ever be in
        assert error_of(reply)["param"] == "n"
        client.running.clear()
        call = Call(http, COMPLETIONS, BODIES[COMPLETIONS] | {"n": 8, "ignore_eos": True})
        while not client.requests:
            await asyncio.sleep(0)
        reply = await http.post(COMPLETIONS, json=BODIES[COMPLETIONS] | {"n": 5})
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        call.leave()
        await call.task
        client.running.set()

    _run(check, settings={"max_queue_requests": 4}, max_num_seqs=8)


def test_the_server_never_writes_defaults_over_what_was_said():
    async def check(http, client):
        await http.post(COMPLETIONS, json={"prompt": "hi", "temperature": 0, "max_tokens": 1})
        assert client.requests[0].sampling_params.temperature == 0

    _run(check, defaults=SamplingParams(temperature=0.9, max_tokens=7))


def test_a_reader_that_takes_nothing_is_dropped():
    async def check(http, client):
        call = Call(http, COMPLETIONS, BODIES[COMPLETIONS] | {"stream": True, "ignore_eos": True})
        await call.until(b"data: ")
        call.is_read.clear()
        await call.task
        assert b"error" not in call.data
        await _until_idle(client)

    _run(check, settings={"send_timeout_s": 0.05}, num_pages=1024)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": [5] * 600}, "prompt"),
        ({"prompt": [5] * 200_000}, "prompt"),
        ({"prompt": [5, 10_000]}, "prompt"),
        ({"prompt": ["a", "b " * 600]}, "prompt"),
        ({"allowed_token_ids": [1, 10_000]}, "allowed_token_ids"),
        ({"bad_words": [[10_000]]}, "bad_words"),
        ({"logit_bias": {"10000": 1}}, "logit_bias"),
        ({"stop_token_ids": [10_000]}, "stop_token_ids"),
    ],
)
def test_what_the_engine_would_refuse_is_not_sent_to_it(more, param):
    """Its time, to read a list of a million ids, is everybody's."""

    async def check(http, client):
        reply = await http.post(COMPLETIONS, json=BODIES[COMPLETIONS] | more)
        assert reply.status_code == 400
        assert error_of(reply)["param"] == param
        assert not client.requests

    _run(check)


@pytest.mark.parametrize(
    ("more", "num_told"),
    [
        ({"echo": True}, 80),
        ({"echo": True, "logprobs": 2}, 240),
        ({"prompt_logprobs": 3}, 320),
        ({"return_token_ids": True, "stream": True}, 80),
        ({"logprobs": 3}, 0),
    ],
)
def test_what_choices_tell_of_their_prompts_is_bounded(more, num_told, monkeypatch):
    """A small body could ask for a reply of gigabytes: each choice repeats its prompt."""
    body = {"prompt": [[5] * 10, [6] * 10], "n": 4, "max_tokens": 1} | more

    async def check(http, client):
        monkeypatch.setattr(calls, "MAX_LOGPROBS", -1)
        monkeypatch.setattr(calls, "MAX_TOLD", max(num_told, 1))
        assert (await http.post(COMPLETIONS, json=body)).status_code == 200
        monkeypatch.setattr(calls, "MAX_TOLD", max(num_told - 1, 0))
        reply = await http.post(COMPLETIONS, json=body)
        if num_told:
            assert reply.status_code == 400
            assert f"at most {num_told - 1} tokens in all" in error_of(reply)["message"]
        else:
            assert reply.status_code == 200

    _run(check)


@BOTH
def test_log_probabilities_of_a_whole_reply_are_bounded(url, monkeypatch):
    """Twenty-one of each token are kilobytes; the engine is not let go on for a reply that nobody gets."""
    tops = {COMPLETIONS: {"logprobs": 4}, CHAT: {"logprobs": True, "top_logprobs": 4}}
    body = BODIES[url] | {"n": 2, "max_tokens": 10, "ignore_eos": True}

    async def check(http, client):
        for num_listed, status in ((100, 200), (99, 400)):
            monkeypatch.setattr(calls, "MAX_LISTED", num_listed)
            reply = await http.post(url, json=body | tops[url])
            assert reply.status_code == status
            await _until_idle(client)
        assert error_of(reply)["code"] == "reply_too_large"
        assert error_of(reply)["param"] == "logprobs"
        assert (await http.post(url, json=body)).status_code == 200
        streamed = body | tops[url] | {"stream": True}
        assert "error" not in (await http.post(url, json=streamed)).text

    _run(check)


@BOTH
def test_a_body_is_not_kept_while_its_reply_is_made(url):
    async def check(http, client):
        client.running.clear()
        call = Call(http, url, BODIES[url] | {"mark-of-a-body": [[1]]})
        while not client.requests:
            await asyncio.sleep(0)
        held = [one for one in gc.get_objects() if type(one) is dict and "mark-of-a-body" in one]
        assert held == []
        client.running.set()
        await call.task

    _run(check)


@BOTH
def test_a_long_reply_is_made_beside_the_event_loop(url, monkeypatch):
    names = []
    made = endpoint._body_of

    def watched(*arguments):
        names.append(threading.current_thread().name)
        return made(*arguments)

    async def check(http, client):
        monkeypatch.setattr(endpoint, "_body_of", watched)
        monkeypatch.setattr(endpoint, "_COSTLY_TOKENS", 20)
        monkeypatch.setattr(endpoint, "_MOST_PARTS", 4)
        whole = (await http.post(url, json=BODIES[url] | {"max_tokens": 20})).json()
        assert names == [threading.current_thread().name]
        longer = (await http.post(url, json=BODIES[url] | {"max_tokens": 21})).json()
        assert names[-1].startswith("encoder")
        assert longer["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] + 1 == 21

    _run(check)
