"""How large requests may be, one and all together, and how long their parts may take, for every route alike.

A middleware behind the key check: a client without a key is not read at all.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.config import MAX_HEADER_BYTES, ServerConfig
from jaxserve.server.errors import RETRY_AFTER_S, ApiError

# Of a body that is too large: this much more is read, for a client that sends first and reads then.
_READ_PAST_BYTES, _READ_PAST_S = 64 * 2**20, 2.0
# Of each body so much is taken whatever the others have, as the connection itself may buffer: who sends
# large ones keeps nobody out who sends small ones.
_FREE_BYTES = 64 * 1024
_DEFAULT_BODIES = 16  # of the largest size, all bodies together


class BodyLimits:
    """Refuses large headers (431), large bodies (413), bodies that do not arrive (408), and what is too much
    beside what others have sent (429).

    A body counts until its reply begins: then it was read, understood and let go.

    Args:
        app: what is behind it.
        config: max_body_bytes, max_bodies_bytes and body_timeout_s are read.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._most = config.max_body_bytes
        self._timeout_s = config.body_timeout_s
        self._bodies = _Bodies(config.max_bodies_bytes or _DEFAULT_BODIES * config.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        check_headers(scope)
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or len(length) > 18:
            raise ApiError(400, "content-length must be a whole number")
        if int(length) > self._most:
            if "expect" not in headers:  # it waits to be told whether to send
                await self._read_past(receive)
            raise self._too_large(length)
        num_bytes, is_complete, share = 0, False, _Share(self._bodies)

        async def bounded_receive() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:  # what comes now is that the client left, however long that takes
                return await receive()
            try:
                async with asyncio.timeout(self._timeout_s):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408,
                    f"no part of the body came for {self._timeout_s:g} s",
                    code="timeout",
                    headers={"Connection": "close"},
                ) from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._most:
                await self._read_past(receive)
                raise self._too_large(f"{num_bytes} and more")
            if not share.grow(num_bytes):
                await self._read_past(receive)
                raise self._too_many()
            is_complete = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def watched_send(message: Message) -> None:
            share.let_go()
            await send(message)

        try:
            await self._app(scope, bounded_receive, watched_send)
        finally:
            share.let_go()

    async def _read_past(self, receive: Receive) -> None:
        """Throws away what the client is sending, so that it gets to read the answer; but not for ever."""
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READ_PAST_S):
                while num_bytes < _READ_PAST_BYTES:
                    message = await receive()
                    if not message.get("more_body", False):
                        return
                    num_bytes += len(message["body"])

    def _too_many(self) -> ApiError:
        return ApiError(
            429,
            f"the bodies of requests without a reply yet may have {self._bodies.most} bytes in all, and have "
            "nearly so many",
            code="bodies_full",
            headers={"Connection": "close", "Retry-After": str(RETRY_AFTER_S)},
        )

    def _too_large(self, got: str) -> ApiError:
        return ApiError(
            413,
            f"the body must have at most {self._most} bytes, got {got}",
            code="request_too_large",
            headers={"Connection": "close"},
        )


@dataclass
class _Bodies:
    """All bodies whose replies have not begun.

    Args:
        most: bytes that they may have, but for the first _FREE_BYTES of each.
        num_bytes: that they have.
    """

    most: int
    num_bytes: int = 0


class _Share:
    """What one body has of them."""

    def __init__(self, bodies: _Bodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> bool:
        """Whether the body may have so many bytes; else it has none any more."""
        num_more = max(0, num_bytes - _FREE_BYTES) - self._num_bytes
        if num_more and self._bodies.num_bytes + num_more > self._bodies.most:
            self.let_go()
            return False
        self._num_bytes += num_more
        self._bodies.num_bytes += num_more
        return True

    def let_go(self) -> None:
        """The body is there no more."""
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0


def check_headers(scope: Scope) -> None:
    """Holds the limit on URL and headers, which a server in front of this one may hold too.

    Raises:
        ApiError: 431, they are larger than MAX_HEADER_BYTES.
    """
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > MAX_HEADER_BYTES:
        raise ApiError(
            431,
            f"URL and headers must have at most {MAX_HEADER_BYTES} bytes, got {size}",
            code="headers_too_large",
            headers={"Connection": "close"},
        )
