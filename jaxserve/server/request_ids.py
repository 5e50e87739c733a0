"""X-Request-Id: taken from the client where it is harmless, else made here; on every reply.

The outermost middleware. Invariant: the id in a log line is printable and short, so a client cannot
forge lines.
"""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HARMLESS = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIds:
    """Gives each request its id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _HARMLESS.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> str:
    """The id of the request that a scope belongs to."""
    return scope["state"]["request_id"]
