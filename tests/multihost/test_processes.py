"""An engine over two processes of two CPU devices each."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.checkpoints import make_random_llama

TIMEOUT_S = 280


def start(repository, model, address: str, count: int, process_id: int, what: str):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(repository),
    }
    arguments = [str(model), address, str(count), str(process_id), what]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.multihost.one_process", *arguments],
        cwd=repository,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}  # fewer KV heads than devices
    return make_random_llama(tmp_path_factory.mktemp("model"), heads)


@pytest.fixture
def pair(repository, model):
    """Starts two processes; none is left."""
    started: list[subprocess.Popen] = []

    def make(what: str):
        address = free_address()
        started.extend(start(repository, model, address, 2, i, what) for i in range(2))
        return started

    yield make
    for process in started:
        process.kill()
        process.communicate()


def lines_of(text: str) -> dict:
    """What a process said; gloo writes to stdout too."""
    said = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {key: value for one in said for key, value in one.items()}


def test_two_processes_say_what_one_says(repository, model, pair):
    leader, follower = pair("ends")
    alone = start(repository, model, "", 1, 0, "ends")
    expected, errors = alone.communicate(timeout=TIMEOUT_S)
    assert alone.returncode == 0, errors
    said, errors = leader.communicate(timeout=TIMEOUT_S)
    assert leader.returncode == 0, errors
    found, expected = lines_of(said), lines_of(expected)
    for name in ("first", "after", "woken"):  # new weights, and a sleep, in between
        assert found[name] == expected[name]
        assert all(ids for choices in found[name] for ids in choices)
    assert found["first"] != found["after"] == found["woken"]
    assert found["num_preemptions"] > 0
    assert found["devices"] == 4
    _, errors = follower.communicate(timeout=60)
    assert follower.returncode == 0, errors


def test_processes_with_different_settings_do_not_start(pair):
    for process, code in zip(pair("differs"), (4, 4), strict=True):
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert "process 1 has seed = 7, process 0 has 0" in errors
        assert process.returncode == code


@pytest.mark.slow
def test_a_follower_that_is_killed_ends_the_leader_with_its_name(pair):
    leader, follower = pair("waits")
    while "waits" not in (line := leader.stdout.readline()):
        assert line, leader.stderr.read()
    follower.send_signal(signal.SIGKILL)
    said, errors = leader.communicate("go on\n", timeout=60)
    assert "process 1 of 2 is gone" in lines_of(said)["error"], errors


@pytest.mark.slow
def test_a_leader_that_dies_ends_its_followers(pair):
    leader, follower = pair("killed")
    leader.communicate(timeout=TIMEOUT_S)
    assert leader.returncode == 3
    _, errors = follower.communicate(timeout=60)
    assert "process 0, the leader, is gone" in errors
    assert follower.returncode in (4, 5)  # by the thread that steps, or the one that listens
