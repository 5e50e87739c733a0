"""Clients that do not read their reply: dropped after a time, so that they hold nothing for ever.

A middleware. While a client is slow, the parts of its reply that the engine makes are merged into one
(`EngineClient.generate`). A long part is sent piece by piece, so that a request, and what it holds, lasts
until nearly all of its reply was taken.

Invariant: what waits for the network is bounded by the transport's own buffer and one piece.
"""

import asyncio
import logging
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.request_ids import request_id_of

_PIECE_BYTES = 64 * 1024

logger = logging.getLogger("jaxserve.server")


class Client(Protocol):
    """What is needed of `Connection`."""

    @property
    def takes_bytes(self) -> bool: ...

    def drop(self) -> None: ...


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

        connection: Client | None = scope.get("state", {}).get("connection")

        async def piecewise_send(message: Message) -> None:
            body, start = message.get("body", b""), 0
            while len(body) - start > _PIECE_BYTES:
                piece = body[start : start + _PIECE_BYTES]
                await bounded_send({**message, "body": piece, "more_body": True})
                start += _PIECE_BYTES
            await bounded_send({**message, "body": body[start:]} if start else message)

        async def bounded_send(message: Message) -> None:
            if connection is not None and connection.takes_bytes:
                await send(message)  # at once, as almost always: a timer would be for nothing
                return
            try:
                async with asyncio.timeout(self._timeout_s):
                    await send(message)
            except TimeoutError:
                if connection is not None:
                    connection.drop()
                logger.warning(
                    "request %s: dropped, its client read nothing for %g s",
                    request_id_of(scope),
                    self._timeout_s,
                )
                raise ClientGoneError from None

        await self._app(scope, receive, piecewise_send)
