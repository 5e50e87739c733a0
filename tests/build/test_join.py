import dataclasses
import socket
import threading

import pytest

from jaxserve.build import join
from jaxserve.config import EngineConfig, ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.multihost.config import ProcessConfig
from jaxserve.multihost.wire import PeerGone, Wire, prove_as_follower

SECRET = bytes(range(32))


def config_of(process_id: int = 0, **options) -> EngineConfig:
    return EngineConfig.from_options(
        {
            "coordinator_address": "127.0.0.1:7000",
            "num_processes": 2,
            "process_id": process_id,
            **options,
        }
    )


def test_one_process_meets_nobody():
    assert join.join_processes(EngineConfig()) is None


def test_replicas_do_not_span_processes():
    with pytest.raises(ConfigError, match="data_parallel_size=2 with num_processes=2"):
        join.join_processes(config_of(data_parallel_size=2))


def test_settings_that_differ_are_named_and_no_others():
    ours = join._settings(config_of(0, compilation_cache_dir="/a", page_size=16))
    same = join._settings(config_of(1, compilation_cache_dir="/b", page_size=16))
    assert join._differences(same, ours) == []
    other = join._settings(config_of(1, page_size=32, dtype="bfloat16"))
    assert join._differences(other, ours) == [
        "dtype = bfloat16, process 0 has auto",
        "page_size = 32, process 0 has 16",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": ParallelConfig(tensor_parallel_size=4)},
        {"seed": 3},
        {"processes": ProcessConfig(coordinator_address="a:1", num_processes=3)},
    ],
)
def test_every_branch_is_compared(changes):
    ours = join._settings(config_of())
    theirs = join._settings(dataclasses.replace(config_of(), **changes))
    assert join._differences(theirs, ours)


def test_who_has_not_the_secret_is_sent_away_and_the_others_are_waited_for():
    with join._listen(config_of().processes) as server:
        address = server.getsockname()
        found: dict[int, Wire] = {}
        thread = threading.Thread(target=lambda: found.update(join._accept(server, SECRET, 3)))
        thread.start()
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(200))
            with pytest.raises((PeerGone, OSError)):
                prove_as_follower(stranger, bytes(32), 1)
        connections = [socket.create_connection(address) for _ in range(2)]
        for number, connection in enumerate(connections, 1):
            prove_as_follower(connection, SECRET, number)
        thread.join(20)
        assert sorted(found) == [1, 2]
        for one in connections:
            one.close()
        for wire in found.values():
            wire.close()


def test_a_follower_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(join, "CONNECT_S", 0.05)
    with (
        join._listen(config_of().processes) as server,
        pytest.raises(ConfigError, match=r"processes \[1\] did not connect within 0.05 s"),
    ):
        join._accept(server, SECRET, 2)
