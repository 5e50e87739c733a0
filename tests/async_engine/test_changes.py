"""Other weights, sleep and waking, of an engine that is awaited: between two steps, whoever streams."""

import asyncio

import pytest

from jaxserve.async_engine.thread import AsyncEngine
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.sampling_params import SamplingParams
from tests.async_engine.clients import fake_client, greedy_request, ids_of, parts_of, run, running
from tests.fakes import expected_tokens, make_engine, next_token

PROMPT = [5, 6, 7]


def versions_of(parts):
    return [v for p in parts for one in p.outputs for v in one.weights_versions]


def check_tokens(parts, weights_of):
    """Every token is that of the weights it names."""
    tokens = list(PROMPT)
    for token, version in zip(ids_of(parts), versions_of(parts), strict=True):
        assert token == next_token([i + weights_of[version] for i in tokens])
        tokens.append(token)


async def begun(engine, request_id, num_tokens=100):
    """A stream of which a part has come, and a task that reads the rest."""
    stream = engine.generate(greedy_request(request_id, PROMPT, num_tokens))
    first = await anext(stream)

    async def rest():
        return [first, *[part async for part in stream]]

    return asyncio.create_task(rest())


@pytest.mark.parametrize("mode", ["continue", "finish_old", "abort"])
def test_weights_come_between_two_steps(mode):
    async def go():
        async with running(fake_client("thread", step_s=0.002)) as engine:
            stream = await begun(engine, "old")
            assert await engine.update_params(5, mode=mode) == 1
            new = await parts_of(engine, greedy_request("new", PROMPT))
            old = await stream
            stats = await engine.stats()
            return old, new, stats

    old, new, stats = run(go())
    assert stats.weights_version == 1
    check_tokens(new, {1: 5})
    check_tokens(old, {0: 0, 1: 5})
    reason = old[-1].outputs[0].finish_reason
    assert reason == ("abort" if mode == "abort" else "length")
    assert set(versions_of(old)) == ({0, 1} if mode == "continue" else {0})


def test_who_streams_waits_while_it_sleeps():
    async def go():
        async with running(fake_client("thread", step_s=0.002)) as engine:
            stream = await begun(engine, "old")
            await engine.sleep()
            assert (await engine.stats()).is_asleep
            new = asyncio.create_task(parts_of(engine, greedy_request("new", PROMPT)))
            leaves = await begun_none(engine)
            await asyncio.sleep(0.05)
            assert not stream.done()
            assert not new.done()
            leaves.cancel()
            await engine.sleep(level=2)
            with pytest.raises(RuntimeError, match="update_params has to come first"):
                await engine.wake()
            assert await engine.update_params(0) == 1
            await engine.wake()
            return await stream, await new

    old, new = run(go())
    assert ids_of(old) == expected_tokens(PROMPT, 100)
    assert ids_of(new) == expected_tokens(PROMPT, 8)


async def begun_none(engine):
    task = asyncio.create_task(parts_of(engine, greedy_request("leaves", PROMPT)))
    await asyncio.sleep(0)
    return task


def test_what_is_wrong_is_told_and_ends_nothing():
    async def go():
        async with running(fake_client("thread")) as engine:
            with pytest.raises(ConfigError, match="mode must be one of"):
                await engine.update_params(5, mode="now")
            with pytest.raises(ConfigError, match="level must be one of"):
                await engine.sleep(level=7)
            return await parts_of(engine, greedy_request("a", PROMPT))

    check_tokens(run(go()), {0: 0})


def test_one_that_sleeps_can_be_shut_down():
    async def go():
        engine = fake_client("thread", step_s=0.002)
        await engine.start()
        stream = await begun(engine, "old")
        await engine.sleep()
        await engine.shutdown(timeout_s=0.05)
        with pytest.raises(EngineDeadError):
            await engine.wake()
        return await stream

    assert run(go())[-1].outputs[0].finish_reason == "abort"


def test_over_an_engine_that_is_there():
    engine = make_engine(async_scheduling=True)

    async def go():
        async with AsyncEngine.from_engine(engine) as awaited:
            params = SamplingParams(max_tokens=8, temperature=0)
            return [part async for part in awaited.generate(PROMPT, params)]

    assert ids_of(run(go())) == expected_tokens(PROMPT, 8)
    engine.add(greedy_request("busy", PROMPT))
    with pytest.raises(ValueError, match="engine has requests in flight"):
        AsyncEngine.from_engine(engine)
    engine.sleep()
    with pytest.raises(ValueError, match="engine has requests in flight"):
        AsyncEngine.from_engine(engine)
