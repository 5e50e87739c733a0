"""Meeting the other processes of a run, before anything is loaded. Called by `LLM` and by `follow_leader`.

    jax.distributed: who is there, all devices
    -> the leader's port and secret, over the devices -> lines over TCP
    -> every process says its settings: they are the same, or nobody starts

Invariant: jax's process-wide state changes only here, and only where the settings name a coordinator.
"""

import dataclasses
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxserve.config import EngineConfig
from jaxserve.device.placement import Placement
from jaxserve.errors import ConfigError, ProcessLostError
from jaxserve.multihost.config import ProcessConfig
from jaxserve.multihost.follower import Leader
from jaxserve.multihost.leader import Followers
from jaxserve.multihost.wire import (
    SECRET_BYTES,
    PeerGone,
    Wire,
    accept_follower,
    prove_as_follower,
)

CONNECT_S = 60.0  # for the lines, once everybody has met; a proof takes no longer than _PROOF_S
_PROOF_S = 10.0
_SHUTDOWN_S = 30  # for the others, at the end

_LOG = logging.getLogger(__name__)


def _ignore(reason: str) -> None:
    """The leader has none above it."""


def join_processes(
    config: EngineConfig, on_lost: Callable[[str], None] = _ignore
) -> Followers | Leader | None:
    """Waits for all processes of the settings.

    Args:
        config: of this process.
        on_lost: for a follower: what to do when the leader is gone; see `Leader`.

    Returns:
        Of the leader, the lines to its followers; of a follower, the line to its leader; None where there is
        one process.

    Raises:
        ConfigError: they did not come, or were started with other settings.
    """
    processes = config.processes
    if not processes.are_several:
        return None
    _check(config)
    leave = _meet(processes)
    settings = _settings(config)
    if not processes.is_leader:
        numbers = multihost_utils.broadcast_one_to_all(np.zeros(1 + SECRET_BYTES, np.int32))
        leader = Leader(_connect(processes, np.asarray(numbers)), on_lost, leave)
        leader.tell("settings", settings)
        try:
            leader.next_message()  # raises where the leader ends instead
        except ProcessLostError:
            leave()
            raise
        return leader
    with _listen(processes) as server:
        secret = secrets.token_bytes(SECRET_BYTES)
        numbers = np.array([server.getsockname()[1], *secret], np.int32)
        multihost_utils.broadcast_one_to_all(numbers)
        followers = Followers(_accept(server, secret, processes.num_processes), leave)
    faults = [
        f"process {process_id} has {difference}"
        for process_id, theirs in followers.ask("settings").items()
        for difference in _differences(theirs, settings)
    ]
    if faults:
        reason = f"the processes were started with different settings: {'; '.join(faults)}"
        followers.close(reason=reason)
        leave()
        raise ConfigError(reason)
    followers.tell("go")
    return followers


def _check(config: EngineConfig) -> None:
    parallel = config.parallel
    if parallel.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size={parallel.data_parallel_size} with num_processes="
            f"{config.processes.num_processes}: replicas share a process; start a server for each instead"
        )


def check_processes(config: EngineConfig, placement: Placement) -> None:
    """Raises ConfigError unless every process has a part of the model, and as many devices as the others.

    Args:
        config: the settings.
        placement: of the engine.
    """
    num_processes = config.processes.num_processes
    counts = Counter(device.process_index for device in placement.devices)
    if len(counts) < num_processes or len(set(counts.values())) > 1:
        size = config.parallel.tensor_parallel_size
        raise ConfigError(
            f"tensor_parallel_size={size}: {num_processes} processes with {jax.device_count()} devices in "
            f"all share a model over all of them: set {jax.device_count()}"
        )


def _meet(processes: ProcessConfig) -> Callable[[], object]:
    """Returns what ends it: a process whose coordinator is gone is killed by jax, so all leave together."""
    leave: Callable[[], object] = lambda: None  # noqa: E731 - its caller has initialized jax, and ends it
    if not jax.distributed.is_initialized():
        leave = jax.distributed.shutdown
        try:
            jax.distributed.initialize(
                processes.coordinator_address,
                processes.num_processes,
                processes.process_id,
                shutdown_timeout_seconds=_SHUTDOWN_S,
            )
        except RuntimeError as error:
            raise ConfigError(
                f"process {processes.process_id} did not meet the others at coordinator_address="
                f"{processes.coordinator_address}: {error}"
            ) from error
    found = jax.process_count(), jax.process_index()
    if found != (processes.num_processes, processes.process_id):
        raise ConfigError(
            f"num_processes={processes.num_processes}, process_id={processes.process_id}: jax was "
            f"initialized with {found[0]} and {found[1]}"
        )
    return leave


def _settings(config: EngineConfig) -> dict[str, Any]:
    """What all processes must have in common, by name, as JSON."""
    tree = dataclasses.asdict(config)
    tree["processes"].pop("process_id")
    flat: dict[str, Any] = {"jax": jax.__version__, "local devices": jax.local_device_count()}
    for name, value in tree.items():
        if name == "compilation_cache_dir":
            continue
        branch = value if isinstance(value, Mapping) else {name: value}
        flat |= {key: str(one) for key, one in branch.items()}
    return flat


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} = {theirs.get(name)}, process 0 has {ours.get(name)}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]


def _listen(processes: ProcessConfig) -> socket.socket:
    """A port of this host that the others reach."""
    host = processes.host
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((host, 0), family=family)
    except OSError:  # a name for this host that is no address of its own, as behind a load balancer
        _LOG.warning("%s is no address of this host: listening on all of its addresses", host)
        return socket.create_server(("", 0), family=family)


def _accept(server: socket.socket, secret: bytes, num_processes: int) -> dict[int, Wire]:
    """Lines to all followers; who has not the secret is sent away."""
    wires: dict[int, Wire] = {}
    end_s = time.monotonic() + CONNECT_S
    while len(wires) < num_processes - 1:
        server.settimeout(max(0.01, end_s - time.monotonic()))
        try:
            connection, address = server.accept()
        except TimeoutError:
            missing = sorted(set(range(1, num_processes)) - wires.keys())
            raise ConfigError(
                f"processes {missing} did not connect within {CONNECT_S:g} s"
            ) from None
        connection.settimeout(_PROOF_S)
        try:
            process_id = accept_follower(connection, secret)
        except (PeerGone, OSError) as error:
            _LOG.warning("a connection from %s was refused: %s", address[0], error)
            connection.close()
            continue
        wires[process_id] = Wire(connection)
    return wires


def _connect(processes: ProcessConfig, numbers: np.ndarray) -> Wire:
    port, secret = int(numbers[0]), bytes(numbers[1:].astype(np.uint8))
    try:
        connection = socket.create_connection((processes.host, port), timeout=CONNECT_S)
        connection.settimeout(_PROOF_S)
        prove_as_follower(connection, secret, processes.process_id)
    except (PeerGone, OSError) as error:
        raise ConfigError(
            f"process 0 cannot be reached at {processes.host}, port {port}: {error}"
        ) from error
    return Wire(connection)
