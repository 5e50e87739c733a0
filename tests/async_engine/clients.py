"""Clients of both kinds, for tests that run on each; and how tests await."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from jaxserve.async_engine.client import Client
from jaxserve.async_engine.process import ProcessEngine
from jaxserve.async_engine.thread import AsyncEngine
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import SamplingParams
from tests.async_engine.fake_served import serve_fake

KINDS = ("thread", "process")
FAKE = "tests.async_engine.fake_served"


def fake_client(kind: str, *, watchdog_timeout_s: float = 60.0, **options: Any) -> Client:
    """A client of an engine over a fake device; not started."""
    if kind == "thread":
        return AsyncEngine.from_served(
            lambda: serve_fake(options), watchdog_timeout_s=watchdog_timeout_s
        )
    return ProcessEngine(json.dumps(options), child=FAKE, watchdog_timeout_s=watchdog_timeout_s)


@asynccontextmanager
async def running(client: Client) -> AsyncGenerator[Any]:
    """A client that is started, and shut down at the end."""
    await client.start()
    try:
        yield client
    finally:
        await client.shutdown()


def run[T](what: Coroutine[Any, Any, T], timeout_s: float = 240.0) -> T:
    """Awaits it in an event loop of its own; nothing may be left behind in that."""

    async def bounded() -> T:
        return await asyncio.wait_for(what, timeout_s)

    return asyncio.run(bounded())


def greedy_request(
    request_id: str, prompt: Sequence[int], num_tokens: int = 8, **fields: Any
) -> Request:
    params = SamplingParams(**({"max_tokens": num_tokens, "temperature": 0} | fields))
    return Request(id=request_id, prompt_token_ids=prompt, sampling_params=params)


async def parts_of(client: Client, request: Request) -> list[RequestOutput]:
    return [part async for part in client.generate(request)]


def ids_of(parts: Sequence[RequestOutput], index: int = 0) -> list[int]:
    return [i for p in parts for one in p.outputs if one.index == index for i in one.token_ids]
