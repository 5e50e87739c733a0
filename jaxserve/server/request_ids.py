"""X-Request-Id: taken from the client where it is harmless, else made here; on every reply. And the line
that the log has of each request.

The outermost middleware. Invariant: nothing of a body reaches the log, and what a client chose (id, path)
is printable and short there, so that nobody forges lines.
"""

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Asked for all the time by machines: told at debug level only.
_QUIET_PATHS = frozenset({"/health", "/ping", "/metrics", "/load", "/dashboard/state"})
_HARMLESS = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

logger = logging.getLogger("jaxserve.server.access")


class RequestIds:
    """Gives each request its id, and logs it when it is done."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _HARMLESS.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            is_quiet = scope["path"] in _QUIET_PATHS
            logger.log(
                logging.DEBUG if is_quiet else logging.INFO,
                "%s %s %s in %.3f s, request %s",
                scope["method"],
                _printable(scope["path"]),
                status or "dropped",
                time.monotonic() - started,
                request_id,
            )


def _printable(path: str) -> str:
    return repr(path)[1:-1] if len(path) <= 100 else repr(path[:100])[1:-1] + "..."


def request_id_of(scope: Scope) -> str:
    """The id of the request that a scope belongs to."""
    return scope["state"]["request_id"]
