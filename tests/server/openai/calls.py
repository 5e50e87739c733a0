"""A POST that runs beside the test: what a client in the same loop cannot show, or do."""

import asyncio
import json
from typing import Any

import httpx

from tests.server.asgi import Answer, asgi_call

_HEADERS = ((b"host", b"localhost"), (b"content-type", b"application/json"))


class Call:
    """One POST to the app behind a client of `serving`.

    Attributes:
        task: ends with the request.
        is_read: clear it, and the client takes nothing more of its reply.
    """

    def __init__(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        self._answer = Answer()
        self._gone = asyncio.Event()
        self.is_read = asyncio.Event()
        self.is_read.set()
        self.task = asyncio.ensure_future(
            asgi_call(
                http._transport.app,  # type: ignore[attr-defined]
                "POST",
                path,
                headers=_HEADERS,
                body=[json.dumps(body).encode()],
                leave=self._gone,
                answer=self._answer,
                send_blocks=self.is_read,
            )
        )

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def data(self) -> bytes:
        return self._answer.body

    def leave(self) -> None:
        """The client closes the connection."""
        self._gone.set()

    async def until(self, wanted: bytes) -> None:
        """Returns when so much of the body has come."""
        while wanted not in self.data:
            assert not self.task.done(), (self.status, self.data)
            await asyncio.sleep(0)
