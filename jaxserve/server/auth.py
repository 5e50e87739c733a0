"""API keys: every path but `OPEN_PATHS` asks for one, where any were given to the server.

Decided on the ASGI path alone: not on the Host header, nor on a URL put together from it. What is not
literally an open path is closed, so a path that a router might read differently never opens anything.
"""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.config import key_digest
from jaxserve.server.dashboard.files import FILES
from jaxserve.server.errors import ApiError

OPEN_PATHS = frozenset(
    {"/health", "/ping", *FILES}
)  # of the page only its files, which tell nothing


class Auth:
    """Refuses requests without an accepted key.

    Args:
        app: what is behind it.
        digests: `key_digest` of each key; empty = everybody may.
    """

    def __init__(self, app: ASGIApp, digests: Sequence[bytes]) -> None:
        self._app = app
        self._digests = tuple(digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests:
            digest = self._accepted(Headers(scope=scope).getlist("authorization"))
            if digest is None and scope["path"] not in OPEN_PATHS:
                raise ApiError(
                    401,
                    "this server needs an API key: send it as `Authorization: Bearer KEY`",
                    type="invalid_request_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            scope.setdefault("state", {})["api_key_digest"] = digest
        await self._app(scope, receive, send)

    def _accepted(self, headers: Sequence[str]) -> bytes | None:
        """The digest of the key, if it is one of ours; all are compared, so that time tells nothing."""
        scheme, _, key = (headers[0] if len(headers) == 1 else "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        given = key_digest(key.strip())
        found = None
        for digest in self._digests:
            if hmac.compare_digest(given, digest):
                found = digest
        return found
