"""`Connection`: uvicorn's HTTP/1.1 protocol, bounded where it is not.

Made by uvicorn for each connection that `serve.py` accepts. Added to it: a limit on the size and the
time of what precedes a body, errors in OpenAI's shape, and what `slow_readers` needs.

Invariant: a connection holds a bounded amount of memory and, unless it makes progress, a bounded time.
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

    return BoundConnection


class Connection(HttpToolsProtocol):
    """One client's connection; see the module."""

    limits: ServerConfig

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_headers = True
        self._num_header_bytes = 0
        self._headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # it was refused; what it still sends is not looked at
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse(
                    431,
                    f"URL and headers must have at most {MAX_HEADER_BYTES} bytes",
                    "headers_too_large",
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._num_header_bytes = True, 0
        self._wait_for_headers()
        self.scope.setdefault("state", {})["connection"] = self

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            # Closed once its last bytes are read, which a client may put off for ever.
            self.loop.call_later(self.limits.send_timeout_s, self.transport.abort)

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
