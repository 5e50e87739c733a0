"""What the page is told: every step once, the pool in few cells, prefixes as text, and never late."""

import asyncio
import base64
from collections import Counter

import pytest

from jaxserve.pages.page_map import PageState, PoolMap
from jaxserve.server.config import key_digest
from jaxserve.server.dashboard import feed
from jaxserve.server.dashboard.feed import MAX_CELLS, SPARK_S, pool, seconds
from jaxserve.server.metric_tallies import Recent
from jaxserve.text.tokenizer import Tokenizer
from tests.llms import TINY
from tests.server.conftest import serving
from tests.server.fake_client import FakeEngineClient

FREE, CACHED, OWNED, SHARED = feed.STATES
PROMPT = "You are a helpful assistant. " * 4


@pytest.fixture(autouse=True)
def always_anew(monkeypatch):
    """Asks the engine every time; one test gives the interval back."""
    monkeypatch.setattr(feed, "MIN_INTERVAL_S", 0.0)


def run(check):
    asyncio.run(check())


async def complete(http, prompt=PROMPT, **fields):
    body = {"prompt": prompt, "max_tokens": 5, **fields}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200
    return reply.json()


async def look(http, since=0, **headers):
    reply = await http.get("/dashboard/state", params={"since": since}, headers=headers)
    assert reply.status_code == 200
    assert reply.headers["cache-control"] == "no-store"
    return reply.json()


def test_an_idle_server():
    async def check():
        async with serving() as http:
            state = await look(http)
            assert (state["status"], state["model"], state["is_stale"]) == ("ready", "fake", False)
            assert state["speaks"] == "chat"
            assert (state["last_step"], state["steps"], state["prefixes"]) == (0, [], [])
            assert state["pages"]["counts"] == {"free": 255, "cached": 0, "owned": 0, "shared": 0}
            assert len(state["seconds"]) == SPARK_S
            assert state["requests"] == {}

    run(check)


def test_what_a_request_leaves():
    async def check():
        async with serving() as http:
            usage = (await complete(http))["usage"]
            await complete(http)
            state = await look(http)
            steps = [dict(zip(state["step_fields"], one, strict=True)) for one in state["steps"]]
            assert [step["number"] for step in steps] == list(range(1, state["last_step"] + 1))
            assert sum(step["num_sampled_tokens"] for step in steps) == 10
            assert sum(step["num_chunk_tokens"] for step in steps) >= usage["prompt_tokens"]
            assert state["requests"] == {"length": 2}
            assert state["stats"]["num_output_tokens"] == 10
            counts = state["pages"]["counts"]
            assert counts["cached"] > 0
            cells = Counter(base64.b64decode(state["pages"]["cells"]))
            assert cells == {FREE: counts["free"], CACHED: counts["cached"]}
            first = state["prefixes"][0]
            assert PROMPT.startswith(first["text"])
            assert len(first["text"]) > 10
            assert (first["num_hits"], first["num_users"], first["parent"]) == (1, 0, None)

    run(check)


def test_only_new_steps_are_told():
    async def check():
        async with serving() as http:
            await complete(http)
            last = (await look(http))["last_step"]
            assert (await look(http, since=last))["steps"] == []
            await complete(http)
            again = await look(http, since=last)
            assert again["steps"][0][0] == last + 1
            assert (await look(http))["steps"][0][0] == 1

    run(check)


def test_however_many_look_the_engine_is_asked_once(monkeypatch):
    monkeypatch.setattr(feed, "MIN_INTERVAL_S", 60.0)

    async def check():
        client = FakeEngineClient()
        asked = []
        report = client.report

        async def counted(**options):
            asked.append(options)
            await asyncio.sleep(0.01)
            return await report(**options)

        client.report = counted
        async with serving(client) as http:
            await complete(http)
            found = await asyncio.gather(*(look(http) for _ in range(10)))
            assert len(asked) == 1
            assert all(len(state["steps"]) == state["last_step"] > 0 for state in found)

    run(check)


def test_an_engine_that_does_not_answer_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(feed, "REPORT_TIMEOUT_S", 0.01)

    async def check():
        client = FakeEngineClient()
        async with serving(client) as http:
            await complete(http)
            before = await look(http)

            async def never(**options):
                await asyncio.sleep(3600)

            client.report = never
            state = await look(http)
            assert state["is_stale"]
            assert state["steps"] == before["steps"]

    run(check)


def test_a_dead_engine():
    async def check():
        client = FakeEngineClient()
        async with serving(client) as http:
            await complete(http)
            before = await look(http)
            client.fail("its process was killed")
            state = await look(http)
            assert state["status"] == "engine_dead"
            assert "engine is gone" in state["problem"]
            assert state["stats"] == before["stats"]

    run(check)


def test_a_server_that_loads_or_ends():
    async def check():
        async with serving() as http:
            admission, http.state._admission = http.state._admission, None
            state = await look(http)
            assert state["status"] == "loading"
            assert "stats" not in state
            http.state._admission = admission
            http.state.is_draining = True
            assert (await look(http))["status"] == "shutting_down"

    run(check)


def test_prompts_under_a_salt_are_not_shown():
    async def check():
        async with serving() as http:
            await complete(http, cache_salt="mine")
            (prefix,) = (await look(http))["prefixes"]
            assert (prefix["is_private"], prefix["text"]) == (True, None)

    run(check)


def test_with_several_keys_nobodys_prompts_are_shown():
    async def check():
        keys = ["sk-one-0123456789", "sk-two-0123456789"]
        async with serving(api_key_digests=[key_digest(key) for key in keys]) as http:
            headers = {"authorization": f"Bearer {keys[0]}"}
            body = {"prompt": PROMPT, "max_tokens": 3}
            await http.post("/v1/completions", json=body, headers=headers)
            for key in keys:
                state = await look(http, authorization=f"Bearer {key}")
                assert state["prefixes"]
                assert {one["text"] for one in state["prefixes"]} == {None}

    run(check)


def test_without_a_chat_template_texts_are_completed():
    async def check():
        whole = Tokenizer.from_directory(TINY)
        async with serving(FakeEngineClient(tokenizer=Tokenizer(whole.to_json(), {}))) as http:
            assert (await look(http))["speaks"] == "completions"

    run(check)


def test_the_last_two_minutes_are_told_second_by_second():
    async def check():
        async with serving() as http:
            now = [1000.0]
            http.state.metrics.clock = lambda: now[0]
            await complete(http)
            now[0] = 1003.2
            found = (await look(http))["seconds"]
            prompt, output, finished, ttft, itl = found[-3]
            assert (output, finished) == (5, 1)
            assert prompt > 10
            assert ttft is not None
            assert itl == 0
            assert all(one == [0, 0, 0, None, None] for one in (*found[:-3], *found[-2:]))

    run(check)


def test_seconds_begin_and_end_where_they_should():
    recent = Recent()
    for at_s in (10, 11, 130, 131):
        recent.at(at_s + 0.5).num_output_tokens = at_s
    found = [one[1] for one in seconds(recent, 131.9)]
    assert len(found) == SPARK_S
    assert (found[0], found[-1]) == (11, 130)  # 131 is not over yet
    assert sum(found) == 141


def pool_of(states):
    return pool(PoolMap(states=bytes([PageState.NULL, *states]), host_pages=b"\1\0\1"), 16)


def test_a_small_pool_has_a_cell_for_each_page():
    found = pool_of([FREE, CACHED, OWNED, SHARED])
    assert base64.b64decode(found["cells"]) == bytes([FREE, CACHED, OWNED, SHARED])
    assert (found["num_pages"], found["pages_per_cell"], found["page_size"]) == (4, 1, 16)
    assert (found["num_host_pages"], found["num_used_host_pages"]) == (3, 2)


def test_a_large_pool_shows_what_most_pages_of_a_cell_are():
    states = [FREE] * (2 * MAX_CELLS + 1)  # three pages a cell
    states[0:3] = [FREE, CACHED, CACHED]
    states[3:6] = [FREE, OWNED, CACHED]  # as many of each: the one in use
    states[6:9] = [SHARED, OWNED, OWNED]
    states[-1] = SHARED
    found = pool_of(states)
    cells = base64.b64decode(found["cells"])
    assert found["pages_per_cell"] == 3
    assert len(cells) == -(-len(states) // 3) <= MAX_CELLS
    assert list(cells[:4]) == [CACHED, OWNED, OWNED, FREE]
    assert cells[-1] == FREE  # two of three
    assert found["counts"] == {
        "free": len(states) - 8,
        "cached": 3,
        "owned": 3,
        "shared": 2,
    }
