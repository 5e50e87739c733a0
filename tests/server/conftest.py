"""Servers for tests: in the test's own loop over a fake engine (`serving`); a real one (`live_server`)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from jaxserve.server.app import make_app
from jaxserve.server.config import ServerConfig
from jaxserve.server.state import ServerState
from tests.server.fake_client import FakeEngineClient
from tests.server.processes import ServerProcess


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers of this session keep what they compiled: the second one starts quickly."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="session")
def live_server(programs: Path) -> Iterator[ServerProcess]:
    """A real server on tiny_llama, for tests that only ask it something and leave it idle."""
    with ServerProcess.tiny(programs, "--shutdown_timeout=5") as server:
        yield server.wait_ready()
        assert server.stop() == 0, server.log


@contextlib.asynccontextmanager
async def serving(
    client: FakeEngineClient | None = None, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app over a fake engine, in this event loop and without a socket.

    The HTTP client has the server's `state` and `engine`, and the `requests` that the engine was given. A
    test looks like this:

        def test_it():
            async def check():
                async with serving(FakeEngineClient(script="hello")) as http:
                    reply = await http.post("/v1/completions", json={"prompt": "hi"})
            asyncio.run(check())

    Note that httpx's ASGI transport gives a stream only when it is complete; what has to be seen while
    it runs needs `asgi_call` of tests/server/asgi.py, or the live server.

    Args:
        client: a fake engine, made inside the loop.
        settings: of `ServerConfig`.
    """
    client = client or FakeEngineClient()
    await client.start()
    state = ServerState(ServerConfig(**{"model": "models/fake"} | settings), client)
    state.set_loaded()
    transport = httpx.ASGITransport(app=make_app(state), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        http.state, http.engine = state, client.engine  # type: ignore[attr-defined]
        http.requests = client.requests  # type: ignore[attr-defined]
        yield http
    await state.close()
    await asyncio.sleep(0)
    client.engine.check_invariants()
    assert not client.engine.has_work(), "a request was left behind in the engine"
