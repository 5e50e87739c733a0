"""The queue's bounds: who is refused, and that every place comes back."""

import asyncio
import time

import pytest

from jaxserve.server.admission import Admission
from jaxserve.server.app import make_app
from jaxserve.server.config import ServerConfig
from jaxserve.server.errors import ApiError
from jaxserve.server.state import ServerState
from tests.server.asgi import Answer, asgi_call
from tests.server.conftest import serving
from tests.server.fake_client import FakeEngineClient

JSON = [(b"host", b"localhost"), (b"content-type", b"application/json")]


def admission(**limits) -> Admission:
    return Admission(
        **{"num_running": 2, "max_queue_requests": 4, "max_queue_tokens": None} | limits
    )


def refused(call, status: int = 429) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status == status
    return caught.value


def test_slots_and_queue_are_counted_together():
    queue = admission()
    places = [queue.admit() for _ in range(6)]
    error = refused(queue.admit)
    assert error.headers["Retry-After"] == "1"
    assert error.code == "queue_full"
    assert error.type == "rate_limit_error"
    places.pop().release()
    places.append(queue.admit())
    refused(queue.admit)
    assert queue.num_refused == 2
    for place in places:
        place.release()
        place.release()  # twice counts once
    assert queue.num_sequences == 0


def test_n_counts_n():
    queue = admission()
    with queue.admit(num_sequences=4):
        refused(lambda: queue.admit(num_sequences=3))
        with queue.admit(num_sequences=2):
            assert queue.num_sequences == 6
    assert queue.num_sequences == 0


def test_what_fits_into_no_queue_is_the_requests_fault():
    error = refused(lambda: admission().admit(num_sequences=7), 400)
    assert error.param == "n"
    assert "6" in error.message
    assert "7" in error.message


def test_prompt_tokens_wait_until_their_prompt_has_started():
    queue = admission(max_queue_tokens=100)
    first = queue.admit()
    first.count_tokens(80)
    second = queue.admit()
    refused(lambda: second.count_tokens(21))
    assert queue.num_queued_tokens == 80
    second.count_tokens(20)
    first.started(50)  # one of its prompts
    assert queue.num_queued_tokens == 50
    refused(lambda: queue.admit(num_tokens=51))
    first.started(30)
    refused(lambda: queue.admit(num_tokens=81))
    assert queue.num_sequences == 2, "a refused request holds no place"
    with queue.admit(num_tokens=80):
        assert queue.num_queued_tokens == 100
    first.release()
    second.release()
    assert queue.num_queued_tokens == queue.num_sequences == 0


def test_a_prompt_beyond_the_limit_is_taken_by_an_empty_queue():
    queue = admission(max_queue_tokens=100)
    with queue.admit(num_tokens=500):
        refused(lambda: queue.admit(num_tokens=1))
    assert queue.num_queued_tokens == 0


async def _post(app, body: bytes, answer: Answer, leave: asyncio.Event | None = None) -> None:
    await asgi_call(
        app, "POST", "/v1/completions", headers=JSON, body=[body], answer=answer, leave=leave
    )


def test_twenty_requests_at_a_queue_of_four():
    """Case C43: limit 4, slots 2, the loop held: 14 are refused at once, the 6 others are answered."""

    async def check():
        client = FakeEngineClient(script="one two three", max_num_seqs=2)
        async with serving(client, max_queue_requests=4) as http:
            client.running.clear()
            answers = [Answer() for _ in range(20)]
            app = make_app(http.state)
            body = b'{"prompt": "hi", "max_tokens": 3}'
            started = time.monotonic()
            tasks = [asyncio.create_task(_post(app, body, answer)) for answer in answers]
            while sum(task.done() for task in tasks) < 14:
                await asyncio.sleep(0.001)
                assert time.monotonic() < started + 10
            refusals = [answer for answer in answers if answer.status]
            assert [answer.status for answer in refusals] == [429] * 14
            assert all(answer.headers["retry-after"] == "1" for answer in refusals)
            assert all(answer.error["code"] == "queue_full" for answer in refusals)
            while len(http.requests) < 6:
                await asyncio.sleep(0.001)
            assert client.engine.stats().num_owned_pages == 0, "nobody has run yet"
            client.running.set()
            await asyncio.gather(*tasks)
            rest = [answer for answer in answers if answer.status == 200]
            assert len(rest) == 6
            assert all(answer.json()["usage"]["completion_tokens"] == 3 for answer in rest)
            assert http.state.admission.num_sequences == 0
            assert client.engine.stats().num_waiting == 0

    asyncio.run(check())


def test_prompts_of_one_request_wait_one_by_one():
    """Of four prompts two run: the other two are still counted, and start when those are done."""

    async def check():
        client = FakeEngineClient(script="one two three", max_num_seqs=2)
        async with serving(client, max_queue_tokens=10) as http:
            app, answer = make_app(http.state), Answer()
            body = b'{"prompt": [[1,2,3],[1,2],[1,2],[1,2]], "max_tokens": 5, "ignore_eos": true}'
            client.running.clear()
            task = asyncio.create_task(_post(app, body, answer))
            queue = http.state.admission
            while queue.num_queued_tokens != 9:
                await asyncio.sleep(0.001)
            client.running.set()
            seen = {9}
            while not task.done():
                seen.add(queue.num_queued_tokens)
                await asyncio.sleep(0)
            assert answer.status == 200
            assert queue.num_queued_tokens == 0
            assert 4 in seen

    asyncio.run(check())


def test_a_client_that_leaves_the_queue_frees_its_place():
    async def check():
        client = FakeEngineClient(script="one two three", max_num_seqs=1)
        async with serving(client, max_queue_requests=1) as http:
            client.running.clear()
            app = make_app(http.state)
            body = b'{"prompt": "hi", "max_tokens": 3, "stream": true}'
            leave = asyncio.Event()
            first, second, third = Answer(), Answer(), Answer()
            tasks = [
                asyncio.create_task(_post(app, body, first)),
                asyncio.create_task(_post(app, body, second, leave)),
            ]
            while len(http.requests) < 2:
                await asyncio.sleep(0.001)
            await _post(app, body, third)
            assert third.status == 429
            leave.set()
            await tasks[1]
            assert client.engine.stats().num_waiting == 1
            tasks.append(asyncio.create_task(_post(app, body, third)))
            while len(http.requests) < 3:
                await asyncio.sleep(0.001)
            client.running.set()
            await asyncio.gather(tasks[0], tasks[2])
            assert first.status == third.status == 200
            assert second.status == 0, "nobody is left to answer"
            assert http.state.admission.num_sequences == 0

    asyncio.run(check())


def test_what_fails_behind_admission_gives_its_place_back():
    async def check():
        async with serving() as http:
            for body in (
                {"prompt": "hi", "max_tokens": -1},
                {"prompt": []},
                {"prompt": "hi", "model": "other"},
                {"prompt": "x" * 5000},
            ):
                reply = await http.post("/v1/completions", json=body)
                assert 400 <= reply.status_code < 500, body
                assert http.state.admission.num_sequences == 0
                assert http.state.num_requests == 0

    asyncio.run(check())


@pytest.mark.parametrize(
    ("setting", "word"), [("queue_timeout_s", "begun"), ("request_timeout_s", "done")]
)
def test_a_request_that_waits_too_long_ends_with_an_error(setting, word):
    async def check():
        client = FakeEngineClient(script="one two three")
        async with serving(client, **{setting: 0.05}) as http:
            client.running.clear()
            reply = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3})
            assert reply.status_code == 504
            error = reply.json()["error"]
            assert error["code"] == "timeout"
            assert word in error["message"]
            assert setting in error["message"]
            assert reply.headers["x-should-retry"] == "false"
            assert not client.engine.has_work()
            client.running.set()

    asyncio.run(check())


def test_a_stream_that_takes_too_long_ends_with_an_error_event():
    async def check():
        client = FakeEngineClient(script="one two three")
        async with serving(client, request_timeout_s=0.3, queue_timeout_s=100) as http:
            app, answer = make_app(http.state), Answer()
            body = b'{"prompt": "hi", "max_tokens": 50, "ignore_eos": true, "stream": true}'
            task = asyncio.create_task(_post(app, body, answer))
            while not answer.parts:
                await asyncio.sleep(0)
            client.running.clear()
            await task
            assert answer.status == 200
            events = answer.body.split(b"\n\n")
            assert b'"code":"timeout"' in events[-3]
            assert events[-2] == b"data: [DONE]"
            assert not client.engine.has_work()
            client.running.set()

    asyncio.run(check())


def test_nothing_is_admitted_while_the_server_loads_drains_or_has_failed():
    async def check():
        client = FakeEngineClient()
        await client.start()
        state = ServerState(ServerConfig(model="fake"), client)
        app = make_app(state)
        for code in ("loading", None, "shutting_down", "engine_dead"):
            answer = Answer()
            await _post(app, b'{"prompt": "hi", "max_tokens": 1}', answer)
            health = await asgi_call(app, "GET", "/health")
            if code is None:
                assert answer.status == health.status == 200
                state.is_draining = True
                continue
            assert answer.status == health.status == 503
            assert answer.error["code"] == health.error["code"] == code
            assert answer.headers["retry-after"] == "1"
            if code == "loading":
                assert (await asgi_call(app, "GET", "/v1/models")).status == 503
                state.set_loaded()
            else:
                client.fail("it was killed")

    asyncio.run(check())
