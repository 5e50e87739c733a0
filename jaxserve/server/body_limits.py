"""How large a request may be and how long its parts may take, for every route alike.

A middleware behind the key check: a client without a key is not read at all.
"""

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.config import MAX_HEADER_BYTES, ServerConfig
from jaxserve.server.errors import ApiError

# Of a body that is too large: this much more is read, for a client that sends first and reads then.
_READ_PAST_BYTES, _READ_PAST_S = 64 * 2**20, 2.0


class BodyLimits:
    """Refuses large headers (431), large bodies (413) and bodies that do not arrive (408).

    Args:
        app: what is behind it.
        config: max_body_bytes and body_timeout_s are read.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._most = config.max_body_bytes
        self._timeout_s = config.body_timeout_s

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
        num_bytes, is_complete = 0, False

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
            is_complete = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        await self._app(scope, bounded_receive, send)

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

    def _too_large(self, got: str) -> ApiError:
        return ApiError(
            413,
            f"the body must have at most {self._most} bytes, got {got}",
            code="request_too_large",
            headers={"Connection": "close"},
        )


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
