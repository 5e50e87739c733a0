"""`run_server`: the life of a server process, from its port to its exit code.

    listen -> the engine warms up (/health: 503) -> ready -> SIGTERM: drain -> engine down -> exit 0
                                                        `-> engine dead: streams end with an error -> exit 1

Called by `jaxserve serve`. The port is taken first, so that a mistake is known before a model is loaded.
Invariant: whatever ends it, the engine process is ended too, and the port is free.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.async_engine.protocol import EngineClient
from jaxserve.errors import ConfigError
from jaxserve.server.app import make_app
from jaxserve.server.config import ServerConfig
from jaxserve.server.connections import connection_class
from jaxserve.server.state import ServerState

EXIT_OK, EXIT_ENGINE_FAILED = 0, 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MAX_FILES = 65536
# How long replies may take to be written once nothing computes any more.
_FLUSH_S = 1.0
# After the engine has failed, /health says so for so long before the port goes away.
_FAILED_LINGER_S = 3.0
_SEND_BUFFER_BYTES = 256 * 1024
_KEEP_ALIVE_S = 75  # longer than the proxies in front of a server usually keep theirs

logger = logging.getLogger("jaxserve.server")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        ConfigError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        # Python adds the address to what the system says.
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (while ")[0]
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from None
    # Its connections inherit this: what the system holds for a client that does not read is bounded too.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return sock


def run_server(config: ServerConfig, make_client: Callable[[], EngineClient]) -> int:
    """Serves until a signal or the engine's end.

    Args:
        config: the settings.
        make_client: gives the engine, not yet started.

    Returns:
        0 after SIGTERM or SIGINT, also when requests had to be aborted; 128 + the signal when a second
        one cut that short; 1 when the engine failed.

    Raises:
        ConfigError: the port cannot be had; the engine cannot be configured so.
        CheckpointError, EngineDeadError: the engine did not start.
    """
    _raise_file_limit()
    with contextlib.closing(listen(config.host, config.port)) as sock:
        life = _Life(config, make_client, sock)
        with asyncio.Runner(loop_factory=life.loop_factory) as runner:
            code = runner.run(life.run())
    for one in _SIGNALS:  # the exit code is decided
        signal.signal(one, signal.SIG_IGN)
    return code


def _raise_file_limit() -> None:
    """Each connection is an open file, and the usual limit is for programs with few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Server(uvicorn.Server):
    """uvicorn's server, whose signals are somebody else's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Life:
    def __init__(
        self, config: ServerConfig, make_client: Callable[[], EngineClient], sock: socket.socket
    ) -> None:
        self._config = config
        self._make_client = make_client
        self._sock = sock
        self._uvicorn_config = uvicorn.Config(
            self._app,
            http=connection_class(config),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self.loop_factory = self._uvicorn_config.get_loop_factory()
        self._asgi: ASGIApp | None = None
        self._stop = asyncio.Event()  # the first signal
        self._force = asyncio.Event()  # the second; a third ends the process on the spot
        self._signal = 0

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._asgi is not None
        await self._asgi(scope, receive, send)

    async def run(self) -> int:
        self._take_signals()
        _take_log_of_uvicorn()
        state = ServerState(self._config, self._make_client())
        self._asgi = make_app(state)
        server = _Server(self._uvicorn_config)
        serving = asyncio.create_task(server.serve([self._sock]))
        try:
            return await self._live(state, serving)
        finally:
            await state.close()
            server.should_exit = True
            server.force_exit = self._force.is_set()
            await serving

    async def _live(self, state: ServerState, serving: "asyncio.Task[None]") -> int:
        host, port = self._sock.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logger.info("listening on %s, not ready yet: the model is loading", url)
        starting = asyncio.create_task(state.client.start())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait([starting, stopping, serving], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            logger.info("stopped before it was ready")
            return EXIT_OK if self._stop.is_set() else EXIT_ENGINE_FAILED
        await starting  # raises what went wrong
        state.set_loaded()
        logger.info("jaxserve: ready on %s", url)
        failing = asyncio.create_task(state.client.wait_failed())
        await asyncio.wait([failing, stopping, serving], return_when=asyncio.FIRST_COMPLETED)
        if self._stop.is_set():
            return await self._drain(state, failing)
        if failing.done():
            return await self._fail(state, failing.result())
        await serving  # raises why nothing is listened to any more
        return EXIT_ENGINE_FAILED

    async def _fail(self, state: ServerState, failure: str) -> int:
        """The engine is gone: every stream gets its error, then the process ends."""
        logger.error("the engine failed: %s", failure)
        await self._wait(asyncio.sleep(_FAILED_LINGER_S), _FAILED_LINGER_S + 1)
        await self._wait(state.wait_idle(), _FLUSH_S)
        return EXIT_ENGINE_FAILED

    async def _drain(self, state: ServerState, failing: "asyncio.Task[str]") -> int:
        """Takes nothing new, lets what runs end for a while, aborts the rest."""
        state.is_draining = True
        timeout_s = self._config.shutdown_timeout_s
        logger.info(
            "%s: %s in flight, %g s to end",
            signal.Signals(self._signal).name,
            _requests(state.num_requests),
            timeout_s,
        )
        await self._wait(state.wait_idle(), timeout_s, failing)
        if failing.done() and state.num_requests:
            return await self._fail(state, failing.result())
        if state.num_requests:
            logger.info("aborting %s", _requests(state.num_requests))
        await state.client.shutdown(timeout_s=0)
        failing.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(state.wait_idle(), _FLUSH_S)
        return 128 + self._signal if self._force.is_set() else EXIT_OK

    async def _wait(
        self, what: Coroutine[Any, Any, None], timeout_s: float, *others: asyncio.Future[Any]
    ) -> None:
        """Until `what` is done, one of the others, the time is over or a second signal came."""
        tasks = [asyncio.ensure_future(what), asyncio.ensure_future(self._force.wait())]
        await asyncio.wait(
            [*tasks, *others], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in tasks:
            task.cancel()

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for one in _SIGNALS:
            loop.add_signal_handler(one, self._on_signal, one)

    def _on_signal(self, number: int) -> None:
        if self._force.is_set():
            os._exit(128 + number)  # the engine sees that its line is closed, and ends too
        self._signal = number
        (self._force if self._stop.is_set() else self._stop).set()


def _requests(num: int) -> str:
    return "1 request" if num == 1 else f"{num} requests"


def _take_log_of_uvicorn() -> None:
    """What it says of failures goes where our log goes; of single bad requests it says nothing."""
    log = logging.getLogger("uvicorn.error")
    log.handlers[:] = logging.getLogger("jaxserve").handlers
    log.propagate = False
    log.setLevel(logging.ERROR)
