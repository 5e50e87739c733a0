"""`Connection`: uvicorn's HTTP/1.1 protocol, bounded where it is not.

Made by uvicorn for each connection that `serve.py` accepts. Added to it: a limit on how many there are,
on the size and the time of what precedes a body, errors in OpenAI's shape, and what `slow_readers` needs.

Invariant: a bounded number of connections hold each a bounded amount of memory and, unless it makes
progress, a bounded time.
"""

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxserve.server.config import MAX_HEADER_BYTES, ServerConfig
from jaxserve.server.errors import ApiError


def connection_class(settings: ServerConfig) -> type[HttpToolsProtocol]:
    """The protocol class with a server's limits, as uvicorn wants it."""

    class BoundConnection(Connection):
        limits = settings
        num_open = 0

    return BoundConnection


class Connection(HttpToolsProtocol):
    """One client's connection; see the module."""

    limits: ServerConfig
    num_open: int  # of this class; refused ones too, until they are closed

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_headers = True
        self._has_progress = False
        self._num_loose_bytes = (
            0  # since the last part of a body, or the end of headers or a message
        )
        self._headers_timer: asyncio.TimerHandle | None = None
        self._num_responses = 0
        self._unread: tuple[int, int] | None = None  # responses and unread bytes at the last look
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        type(self).num_open += 1
        if self.num_open > self.limits.max_connections:
            self._refuse(
                503,
                f"the server has {self.limits.max_connections} connections, which is its limit; "
                "try again later",
                "too_many_connections",
            )
            return
        self._wait_for_headers()
        self._look_at_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        type(self).num_open -= 1
        self._stop_waiting()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # it was refused; what it still sends is not looked at
        self._has_progress = False
        super().data_received(data)
        # Headers that have no end yet, and what else is no part of a body: trailers, the rest of a chunk's
        # first line, empty lines.
        self._num_loose_bytes = 0 if self._has_progress else self._num_loose_bytes + len(data)
        if self._num_loose_bytes > MAX_HEADER_BYTES:
            self._refuse(
                431,
                f"URL and headers must have at most {MAX_HEADER_BYTES} bytes",
                "headers_too_large",
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._wait_for_headers()
        self.scope.setdefault("state", {})["connection"] = self

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # else a trailer, which comes when the headers were looked at already
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers, self._has_progress = False, True
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_progress = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._num_responses += 1
        super().on_response_complete()

    def _look_at_unread(self) -> None:
        """Ends the connection if its client has read nothing between two looks of what is left of the last
        response: neither a connection that is kept alive nor one that is closed may wait for that for
        ever. While a response is being sent, `slow_readers` holds the limit.
        """
        self._unread_timer = self.loop.call_later(self.limits.send_timeout_s, self._look_at_unread)
        before, self._unread = self._unread, None
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.transport.is_closing():
            self._unread = (self._num_responses, self.transport.get_write_buffer_size())
        if before is None or self._unread is None or before[0] != self._unread[0]:
            return
        if self._unread[1] and self._unread[1] >= before[1]:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Called where the bytes are no HTTP."""
        self._refuse(400, "this is no valid HTTP/1.1 request", "invalid_http")

    @property
    def takes_bytes(self) -> bool:
        """Whether what is sent now is taken at once: little waits for the client to read."""
        return not self.flow.write_paused

    def drop(self) -> None:
        """Ends the connection, and throws away what its client has not read."""
        self.transport.abort()

    def _wait_for_headers(self) -> None:
        self._stop_waiting()
        self._headers_timer = self.loop.call_later(
            self.limits.body_timeout_s, self._headers_are_late
        )

    def _stop_waiting(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _headers_are_late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(408, f"no request came for {self.limits.body_timeout_s:g} s", "timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Ends the connection with an error; nothing of the request has reached the application."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # an answer to an earlier request is under way
            return
        body = msgspec.json.encode(ApiError(status, message, code=code).body())
        head = [
            STATUS_LINE[status],
            b"content-type: application/json\r\nconnection: close\r\n",
            b"content-length: %d\r\n\r\n" % len(body),
        ]
        self.transport.write(b"".join([*head, body]))
        self.transport.close()
