"""A raw ASGI call, for what an HTTP client in the same loop cannot show: a reply while it runs, a client that leaves."""

import asyncio
import json
from typing import Any

import httpx


class Call:
    """One POST to the app behind a client of `serving`, running as a task.

    Attributes:
        status: of the reply; None before it has begun.
        data: of its body so far.
        task: ends with the request.
    """

    def __init__(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        self.status: int | None = None
        self.data = b""
        self.is_read = asyncio.Event()  # cleared, the client takes nothing of its reply
        self.is_read.set()
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        self._requests = [
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        ]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        app = http._transport.app  # type: ignore[attr-defined]
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        """The client closes the connection."""
        self._gone.set()

    async def until(self, wanted: bytes) -> None:
        """Returns when so much of the body has come."""
        while wanted not in self.data:
            assert not self.task.done(), (self.status, self.data)
            self._news.clear()
            await self._news.wait()

    async def _receive(self) -> dict[str, Any]:
        if self._requests:
            return self._requests.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.is_read.wait()
        self.status = message.get("status", self.status)
        self.data += message.get("body", b"")
        self._news.set()
