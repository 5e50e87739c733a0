"""What `EngineClient` promises, on engines of both kinds over a fake device."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from jaxserve.errors import ConfigError, EngineDeadError, InvalidRequestError
from jaxserve.request import Request, merge_outputs
from jaxserve.sampling_params import BeamParams, SamplingParams
from tests.async_engine.clients import (
    KINDS,
    fake_client,
    greedy_request,
    ids_of,
    parts_of,
    run,
    running,
)
from tests.fakes import expected_beams, expected_tokens

pytestmark = pytest.mark.parametrize("kind", KINDS)


async def idle_stats(client):
    """The stats once nothing runs: a client may be told of an end a moment before it can be seen."""
    stats = await client.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held) == (0, 0, 0)
    assert stats.num_owned_pages == 0
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages - 1
    return stats


def test_many_at_once_each_get_their_own(kind):
    prompts = [[i, 2 * i, 7] for i in range(1, 40)]

    async def go():
        async with running(fake_client(kind)) as client:
            several = await asyncio.gather(
                *(parts_of(client, greedy_request(f"r{p[0]}", p, 11)) for p in prompts)
            )
            await idle_stats(client)
            return several

    for prompt, parts in zip(prompts, run(go()), strict=True):
        assert ids_of(parts) == expected_tokens(prompt, 11)
        assert [p.finished for p in parts] == [False] * (len(parts) - 1) + [True]
        whole = merge_outputs(parts)
        assert whole.outputs[0].finish_reason == "length"
        assert whole.num_prompt_tokens == 3
        assert whole.times is not None


def test_choices_and_beams(kind):
    beam = BeamParams(beam_width=3, max_tokens=6)

    async def go():
        async with running(fake_client(kind, draws=True)) as client:
            drawn = greedy_request("n", [5, 6], 7, n=3, temperature=1.0, seed=3, logprobs=2)
            searched = Request(id="b", prompt_token_ids=[8, 9], beam=beam)
            return await asyncio.gather(parts_of(client, drawn), parts_of(client, searched))

    drawn, searched = run(go())
    assert len({tuple(ids_of(drawn, i)) for i in range(3)}) == 3
    whole = merge_outputs(drawn)
    assert [one.finish_reason for one in whole.outputs] == ["length"] * 3
    assert all(len(one.logprobs) == len(one.top_logprobs) == 7 for one in whole.outputs)
    assert all(type(x) is float for one in whole.outputs for x in one.logprobs)
    found = merge_outputs(searched).outputs
    assert [(one.token_ids, one.score) for one in found] == [
        (ids, pytest.approx(score)) for ids, score, _ in expected_beams([8, 9], beam)
    ]


def test_prompt_logprobs_are_in_every_part(kind):
    async def go():
        async with running(fake_client(kind)) as client:
            request = greedy_request("a", [3, 4, 5], 5, prompt_logprobs=2)
            return await parts_of(client, request)

    parts = run(go())
    first = parts[0].prompt_logprobs
    assert first is not None
    assert first[0] is None
    assert len(first) == 3
    assert len(first[1].top) == 2
    assert all(part.prompt_logprobs == first for part in parts)


def test_invalid_requests_are_refused_before_the_first_part(kind):
    refused = [
        (greedy_request("a", [2000]), "prompt"),
        (greedy_request("a", []), "prompt"),
        (greedy_request("a", ["x"]), "prompt"),  # type: ignore[list-item]
        (greedy_request("a", [1], stop=["x"]), "stop"),
        (greedy_request("a", [1] * 500), "prompt"),
        (Request(id="a", prompt_token_ids=[1], hold=True), "hold"),
        (greedy_request("a", [1], structured_outputs={"regex": "a"}), "structured_outputs"),
    ]

    async def go():
        async with running(fake_client(kind)) as client:
            for request, param in refused:
                with pytest.raises(InvalidRequestError) as error:
                    await parts_of(client, request)
                assert error.value.param == param
            # The id is free again, and everything still works.
            parts = await parts_of(client, greedy_request("a", [1, 2]))
            await idle_stats(client)
            return parts

    assert ids_of(run(go())) == expected_tokens([1, 2], 8)


def test_numbers_of_other_types_are_taken(kind):
    """What the border takes reaches the engine: numpy integers, integers beyond 64 bits."""

    async def go():
        async with running(fake_client(kind)) as client:
            params = SamplingParams(max_tokens=10**30, temperature=0, stop_token_ids=[966])
            ids = np.array([1, 2, 3], np.int32)
            return await parts_of(
                client, Request(id="a", prompt_token_ids=ids, sampling_params=params)
            )

    assert ids_of(run(go())) == [847, 505, 182, 674, 966]


def test_two_requests_of_one_id(kind):
    async def go():
        async with running(fake_client(kind, step_s=0.002)) as client:
            async with aclosing(client.generate(greedy_request("same", [1, 2], 60))) as first:
                parts = [await anext(first)]
                with pytest.raises(InvalidRequestError, match="'same' is already in flight"):
                    await parts_of(client, greedy_request("same", [3, 4]))
                parts += [part async for part in first]
            again = await parts_of(client, greedy_request("same", [3, 4]))
            return parts, again

    parts, again = run(go())
    assert ids_of(parts) == expected_tokens([1, 2], 60)
    assert ids_of(again) == expected_tokens([3, 4], 8)


def test_an_id_is_free_as_soon_as_its_reader_has_left(kind):
    async def go():
        async with running(fake_client(kind, step_s=0.002)) as client:
            for number in range(20):
                async with aclosing(client.generate(greedy_request("a", [number + 1], 100))) as it:
                    part = await anext(it)
                assert ids_of([part]) == expected_tokens([number + 1], len(ids_of([part])))
            await idle_stats(client)

    run(go())


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_leaving_aborts(kind, how):
    async def go():
        async with running(fake_client(kind, step_s=0.005)) as client:
            if how == "close":
                async with aclosing(client.generate(greedy_request("a", [1, 2], 120))) as parts:
                    await anext(parts)
            else:
                task = asyncio.create_task(parts_of(client, greedy_request("a", [1, 2], 120)))
                while (await client.stats()).num_running == 0:
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
            stats = await client.stats()  # commands are taken in order: it comes after the abort
            assert stats.num_running == 0
            assert stats.num_output_tokens < 100
            assert not client._streams

    run(go())


def test_abort_ends_a_generator(kind):
    async def go():
        async with running(fake_client(kind, step_s=0.005)) as client:
            parts = []
            async for part in client.generate(greedy_request("a", [1, 2], 120, n=2)):
                parts.append(part)
                if len(parts) == 2:
                    await client.abort("a")
                    await client.abort("a")
            await client.abort("a")
            await client.abort("never heard of")
            await idle_stats(client)
            return parts

    parts = run(go())
    assert parts[-1].finished
    assert {one.finish_reason for one in parts[-1].outputs} == {"abort"}
    assert 0 < len(ids_of(parts)) < 120


def test_a_slow_reader_holds_nobody_up(kind):
    async def go():
        async with running(fake_client(kind)) as client:
            async with aclosing(client.generate(greedy_request("slow", [1, 2], 100))) as slow:
                first = await anext(slow)
                for number in range(5):
                    await parts_of(client, greedy_request(f"{number}", [number, 9], 100))
                rest = [part async for part in slow]
            return [first, *rest]

    parts = run(go())
    assert ids_of(parts) == expected_tokens([1, 2], 100)
    assert len(parts) == 2, "what came while nobody read is one part"


def test_reset_prefix_cache(kind):
    async def go():
        async with running(fake_client(kind)) as client:
            prompt = list(range(1, 30))
            await parts_of(client, greedy_request("a", prompt))
            assert (await client.stats()).num_cached_pages > 0
            again = await parts_of(client, greedy_request("b", prompt))
            await client.reset_prefix_cache()
            assert (await client.stats()).num_cached_pages == 0
            anew = await parts_of(client, greedy_request("c", prompt))
            return again[-1].num_cached_tokens, anew[-1].num_cached_tokens

    again, anew = run(go())
    assert again == 28
    assert anew == 0


def test_report(kind):
    async def go():
        async with running(fake_client(kind)) as client:
            await parts_of(client, greedy_request("a", list(range(1, 30)), 5))
            bare = await client.report()
            whole = await client.report(since_step=2, with_pages=True)
            return bare, whole, await client.stats()

    bare, whole, stats = run(go())
    assert bare.pages is None
    assert [s.number for s in bare.steps] == list(range(1, bare.last_step + 1))
    assert [s.number for s in whole.steps] == list(range(3, bare.last_step + 1))
    assert whole.stats == stats
    assert whole.pages is not None
    assert whole.prefixes


def test_shutdown_lets_what_runs_end(kind):
    async def go():
        client = fake_client(kind, step_s=0.002)
        await client.start()
        task = asyncio.create_task(parts_of(client, greedy_request("a", [1, 2], 50)))
        while (await client.stats()).num_running == 0:
            await asyncio.sleep(0)
        end = asyncio.create_task(client.shutdown(timeout_s=30.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await parts_of(client, greedy_request("b", [1, 2]))
        parts = await task
        await end
        assert client.failure == "the engine was shut down"
        assert await client.wait_failed() == client.failure
        with pytest.raises(EngineDeadError, match="shut down"):
            await client.stats()
        await client.shutdown()
        return parts

    assert ids_of(run(go())) == expected_tokens([1, 2], 50)


def test_shutdown_aborts_what_takes_longer(kind):
    async def go():
        client = fake_client(kind, step_s=0.02)
        await client.start()
        task = asyncio.create_task(parts_of(client, greedy_request("a", [1, 2], 120)))
        while (await client.stats()).num_running == 0:
            await asyncio.sleep(0)
        slow = asyncio.create_task(client.shutdown(timeout_s=60.0))
        await asyncio.sleep(0.05)
        await client.shutdown(timeout_s=0.0)  # the sooner end counts
        await slow
        return await task

    parts = run(go())
    assert parts[-1].outputs[0].finish_reason == "abort"


def test_a_start_that_fails_says_why(kind):
    async def go(fails, error, text):
        client = fake_client(kind, fails=fails)
        with pytest.raises(error, match=text):
            await client.start()
        assert client.failure is not None
        with pytest.raises(EngineDeadError):
            await client.stats()
        await client.shutdown()

    run(go("ConfigError", ConfigError, "no such thing"))
    run(go("odd", EngineDeadError, "RuntimeError: odd"))


def test_failed_steps_are_repeated(kind):
    async def go():
        async with running(fake_client(kind, num_to_raise=2)) as client:
            return await asyncio.gather(
                parts_of(client, greedy_request("a", [992, 1], 9)),
                parts_of(client, greedy_request("b", [5, 1], 9)),
            )

    one, other = run(go())
    assert ids_of(one) == expected_tokens([992, 1], 9)
    assert ids_of(other) == expected_tokens([5, 1], 9)


def test_steps_that_always_fail_end_the_engine(kind):
    async def go():
        client = fake_client(kind)
        await client.start()
        tasks = [
            asyncio.create_task(parts_of(client, greedy_request(f"{i}", [i], 50)))
            for i in (1, 992, 3)
        ]
        reason = await client.wait_failed()
        for task in tasks:
            with pytest.raises(EngineDeadError, match="steps in a row failed"):
                await task
        assert "Mishap: this step cannot be computed" in reason
        await client.shutdown()
        assert client.failure == reason

    run(go())


def test_what_is_not_started_says_so(kind):
    async def go():
        client = fake_client(kind)
        with pytest.raises(RuntimeError, match="start"):
            await client.stats()
        with pytest.raises(RuntimeError, match="start"):
            client.model  # noqa: B018
        await client.shutdown()
        assert client.failure == "the engine was never started"

    run(go())
