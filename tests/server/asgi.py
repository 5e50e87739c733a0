"""`asgi_call`: one request straight into an ASGI application, its scope chosen by the test byte by byte."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp


@dataclass
class Answer:
    """What the application sent, as it comes.

    Args:
        status: 0 until it is known.
        headers: by name in lower case.
        parts: the pieces of the body.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]


async def asgi_call(
    app: ASGIApp,
    method: str,
    path: str,
    *,
    raw_path: bytes | None = None,
    query: bytes = b"",
    headers: Sequence[tuple[bytes, bytes]] = ((b"host", b"localhost"),),
    body: Sequence[bytes] = (b"",),
    goes_on: asyncio.Event | None = None,
    leave: asyncio.Event | None = None,
    answer: Answer | None = None,
    send_blocks: asyncio.Event | None = None,
) -> Answer:
    """Calls the application.

    Args:
        body: the pieces of the request's body.
        goes_on: the last piece comes when it is set.
        leave: when set, the client is gone.
        answer: filled while the application runs, for tests that look on.
        send_blocks: a client that does not read: once two messages were sent, each send waits for this.
    """
    answer = answer or Answer()
    pieces = list(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode() if raw_path is None else raw_path,
        "query_string": query,
        "root_path": "",
        "headers": list(headers),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }

    async def receive():
        if pieces:
            piece = pieces.pop(0)
            if goes_on is not None and not pieces:
                await goes_on.wait()
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if send_blocks is not None and answer.parts:
            await send_blocks.wait()
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        else:
            answer.parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return answer
