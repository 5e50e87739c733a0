"""What is of `AsyncEngine` alone: its thread."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxserve.async_engine.commands import AbortRequest, Ended, Refused
from jaxserve.async_engine.engine_loop import ClientGone
from jaxserve.async_engine.thread import AsyncEngine, ThreadLine
from jaxserve.errors import ConfigError, EngineDeadError
from tests.async_engine import fake_served
from tests.async_engine.clients import fake_client, greedy_request, ids_of, parts_of, run, running
from tests.fakes import expected_tokens

REPOSITORY = Path(__file__).parent.parent.parent


def test_a_hung_step_is_seen_and_shown(capfd):
    async def go():
        client = fake_client("thread", watchdog_timeout_s=0.3)
        await client.start()
        other = asyncio.create_task(parts_of(client, greedy_request("a", [1], 120)))
        with pytest.raises(EngineDeadError, match=r"a step hangs: .* watchdog_timeout_s \(0.3\)"):
            await parts_of(client, greedy_request("b", [fake_served.HANGS]))
        with pytest.raises(EngineDeadError):
            await other
        fake_served.end_of_hang.set()
        await client.shutdown()
        assert not client._thread.is_alive()

    try:
        run(go())
    finally:
        fake_served.end_of_hang.clear()
    assert "in submit" in capfd.readouterr().err


def test_no_thread_is_left_after_shutdown():
    before = set(threading.enumerate())

    async def go():
        async with running(fake_client("thread")) as client:
            await parts_of(client, greedy_request("a", [1]))
            assert any(thread.name == "engine" for thread in threading.enumerate())

    run(go())
    assert set(threading.enumerate()) <= before


def test_prompts_need_no_request():
    async def go():
        async with fake_client("thread") as engine:
            assert isinstance(engine, AsyncEngine)
            params = fake_served.SamplingParams(max_tokens=5, temperature=0)
            several = [engine.generate([i, 3], params) for i in range(1, 5)]

            async def read(parts):
                return [part async for part in parts]

            return await asyncio.gather(*map(read, several))

    for number, parts in enumerate(run(go()), start=1):
        assert ids_of(parts) == expected_tokens([number, 3], 5)


def test_bad_options_are_refused_at_once():
    with pytest.raises(ConfigError, match="unknown option 'nothing'"):
        AsyncEngine("model", nothing=1)
    with pytest.raises(ConfigError, match="watchdog_timeout_s must be a number above 0"):
        AsyncEngine("model", watchdog_timeout_s=-1.0)


def test_a_line_within_a_process():
    taken = []

    async def go():
        line = ThreadLine(asyncio.get_running_loop(), taken.append)
        line.put(AbortRequest("a"))
        line.put(AbortRequest("b"))
        assert line.receive(None) == [AbortRequest("a"), AbortRequest("b")]
        assert line.receive(0.0) == []
        line.wake()
        assert line.receive(None) == []
        assert line.receive(0.01) == []
        events = [Refused(str(i), "", None, None, True) for i in range(100)]
        thread = threading.Thread(target=lambda: [line.send(one) for one in events])
        thread.start()
        while len(taken) < 100:
            await asyncio.sleep(0)
        thread.join()
        assert taken == events
        return line

    line = run(go())
    line.send(Ended(None))  # the event loop is closed: nobody hears it
    with pytest.raises(ClientGone):
        line.receive(0.0)


def test_importing_it_needs_nothing_of_the_server():
    """`AsyncEngine` is there without the extra `serve`; and `import jaxserve` stays light."""
    code = (
        "import sys; sys.modules['msgspec'] = None; import jaxserve; "
        "assert 'jax' not in sys.modules and 'asyncio' not in sys.modules; jaxserve.AsyncEngine; "
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_cancelled_start_ends_the_thread_when_it_is_made():
    made = threading.Event()

    def make():
        made.wait(10)
        return fake_served.serve_fake()

    async def go():
        client = AsyncEngine.from_served(make)
        start = asyncio.create_task(client.start())
        while client._thread is None:
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.wait([start])
        assert start.cancelled()
        assert client.failure == "the engine was not started"
        made.set()
        await asyncio.to_thread(client._thread.join, 10)
        assert not client._thread.is_alive()

    run(go())
