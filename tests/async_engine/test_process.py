"""The engine's process: what happens when it dies, hangs or is left alone."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxserve.async_engine.process import ProcessEngine
from jaxserve.errors import ConfigError, EngineDeadError
from tests.async_engine.clients import fake_client, greedy_request, parts_of, run

REPOSITORY = Path(__file__).parent.parent.parent


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_gone(pid: int, timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while is_alive(pid):
        assert time.monotonic() < end_s, f"process {pid} is left"
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["SIGKILL", "exits", "hangs"])
def test_death_is_seen_by_everyone_who_waits(how, capfd):
    begins_with = {"exits": 991, "hangs": 990}.get(how, 5)

    async def go():
        client = fake_client("process", step_s=0.005, watchdog_timeout_s=2.0)
        await client.start()
        requests = [greedy_request(f"{i}", [i, 4], 100) for i in (1, 2, 3)]
        tasks = [asyncio.create_task(parts_of(client, one)) for one in requests]
        while (await client.stats()).num_running < 3:
            await asyncio.sleep(0)
        tasks.append(asyncio.create_task(parts_of(client, greedy_request("x", [begins_with], 100))))
        tasks.append(asyncio.create_task(client.stats()))
        if how == "SIGKILL":
            os.kill(client.pid, signal.SIGKILL)
        reason = await client.wait_failed()
        done, pending = await asyncio.wait(tasks, timeout=1.0)
        assert not pending, "somebody waits for an engine that is gone"
        deaths = [t for t in done if isinstance(t.exception(), EngineDeadError)]
        assert len(deaths) >= 3
        with pytest.raises(EngineDeadError):
            await parts_of(client, greedy_request("late", [1]))
        await client.shutdown()
        assert not is_alive(client.pid)
        return reason

    reason = run(go())
    expected = {"SIGKILL": "SIGKILL", "exits": "exit code 3", "hangs": "a step hangs"}
    assert expected[how] in reason
    stacks = capfd.readouterr().err
    assert ("in submit" in stacks) == (how == "hangs")


def test_a_stopped_process_is_ended_too():
    async def go():
        client = fake_client("process", step_s=0.005, watchdog_timeout_s=1.0)
        await client.start()
        task = asyncio.create_task(parts_of(client, greedy_request("a", [1], 120)))
        while (await client.stats()).num_running == 0:
            await asyncio.sleep(0)
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="a step hangs"):
            await task
        await client.shutdown()
        assert not is_alive(client.pid)

    run(go())


def test_an_idle_engine_never_hangs():
    async def go():
        client = fake_client("process", watchdog_timeout_s=0.2)
        await client.start()
        await parts_of(client, greedy_request("a", [1]))
        await asyncio.sleep(1.0)
        assert client.failure is None
        await client.shutdown()

    run(go())


def test_shutdown_during_the_start_leaves_nothing():
    async def go():
        client = fake_client("process", fails="hangs")
        start = asyncio.create_task(client.start())
        while client.pid is None:
            await asyncio.sleep(0.01)
        await client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down while it started"):
            await start
        assert not is_alive(client.pid)

    run(go())


def test_a_cancelled_start_leaves_nothing():
    async def go():
        client = fake_client("process", fails="hangs")
        start = asyncio.create_task(client.start())
        while client.pid is None:
            await asyncio.sleep(0.01)
        start.cancel()
        await asyncio.wait([start])
        assert start.cancelled()
        assert not is_alive(client.pid)

    run(go())


def test_bad_options_are_refused_before_there_is_a_process():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        ProcessEngine("model", max_num_seqs=0)
    with pytest.raises(ConfigError, match="unknown option 'max_num_seq'"):
        ProcessEngine("model", max_num_seq=1)
    with pytest.raises(ConfigError, match="watchdog_timeout_s"):
        ProcessEngine("model", watchdog_timeout_s=0)


PARENT = """
import asyncio, sys
from tests.async_engine.clients import fake_client, greedy_request, parts_of

async def main():
    client = fake_client("process", **{options})
    start = asyncio.create_task(client.start())
    while client.pid is None:
        await asyncio.sleep(0.01)
    if {wait}:
        await start
        task = asyncio.create_task(parts_of(client, greedy_request("a", [1], 120)))
        while (await client.stats()).num_running == 0:
            await asyncio.sleep(0)
    print(client.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("options", "wait"),
    [({"step_s": 0.01}, True), ({"fails": "hangs"}, False)],
    ids=["serving", "starting"],
)
def test_it_ends_when_its_parent_is_killed(options, wait):
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PARENT.replace("{options}", repr(options)).replace("{wait}", str(wait)),
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    wait_gone(pid)


def test_ctrl_c_reaches_the_parent_alone():
    """As a terminal sends it: to the whole group in the foreground."""
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PARENT.replace("{options}", "{'step_s': 0.01}").replace("{wait}", "1"),
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGINT)  # even so
        time.sleep(0.3)
        assert is_alive(pid)
        assert os.getpgid(pid) != os.getpgid(parent.pid)
        os.killpg(parent.pid, signal.SIGINT)
        _, errors = parent.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    wait_gone(pid)


def test_what_the_process_started_goes_with_it():
    """A grammar that is compiled runs in a process of the engine's process."""

    async def go():
        client = fake_client("process", tokenizer=True)
        await client.start()
        nested = "(" * 300 + "a" + "){1,9}" * 300
        request = greedy_request("g", [1], structured_outputs={"regex": nested})
        task = asyncio.create_task(parts_of(client, request))
        children: list[int] = []
        while not children and not task.done():
            await asyncio.sleep(0.005)
            children = children_of(client.pid)
        os.kill(client.pid, signal.SIGKILL)
        await asyncio.wait([task])
        await client.shutdown()
        return children

    children = run(go())
    assert children
    for pid in children:
        wait_gone(pid)


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        paths = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(one) for path in paths for one in path.read_text().split()]
    return []
