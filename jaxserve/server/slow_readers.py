"""Clients that do not read their reply: dropped after a time, so that they hold nothing for ever.

A middleware. While a client is slow, the parts of its reply that the engine makes are merged into one
(`EngineClient.generate`), and what waits for the network is bounded by the transport's own buffer.
"""

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.request_ids import request_id_of

logger = logging.getLogger("jaxserve.server")


class ClientGoneError(Exception):
    """There is nobody left to answer."""


class SlowReaders:
    """Gives up on a reply that nobody takes.

    Args:
        app: what is behind it.
        timeout_s: how long a client may take nothing at all.
    """

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def bounded_send(message: Message) -> None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await send(message)
            except TimeoutError:
                drop = scope["state"].get("drop")
                if drop is not None:
                    drop()
                logger.warning(
                    "request %s: dropped, its client read nothing for %g s",
                    request_id_of(scope),
                    self._timeout_s,
                )
                raise ClientGoneError from None

        await self._app(scope, receive, bounded_send)
