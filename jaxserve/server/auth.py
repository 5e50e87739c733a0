"""API keys: every path but `OPEN_PATHS` asks for one, where any were given to the server.

Decided on the ASGI path alone: not on the Host header, nor on a URL put together from it. What is not
literally an open path is closed, so a path that a router might read differently never opens anything.
A key comes as `Authorization: Bearer KEY`. A browser that opens the page at / is asked for a name and a
password, the key being the password (`Basic`), and then sends it by itself.
"""

import base64
import binascii
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.config import key_digest
from jaxserve.server.dashboard.files import FILES
from jaxserve.server.errors import ApiError

OPEN_PATHS = frozenset({"/health"})


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
                # A challenge of the kind Basic makes browsers ask; clients of the API are not to.
                kind = 'Basic realm="jaxserve"' if scope["path"] in FILES else "Bearer"
                raise ApiError(
                    401,
                    "no API key, or a wrong one: send one of this server's as `Authorization: Bearer KEY`",
                    type="invalid_request_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": kind},
                )
            scope.setdefault("state", {})["api_key_digest"] = digest
        await self._app(scope, receive, send)

    def _accepted(self, headers: Sequence[str]) -> bytes | None:
        """The digest of the key, if it is one of ours; all are compared, so that time tells nothing."""
        key = _key_of(headers[0]) if len(headers) == 1 else None
        if key is None:
            return None
        given = key_digest(key)
        found = None
        for digest in self._digests:
            if hmac.compare_digest(given, digest):
                found = digest
        return found


def _key_of(header: str) -> str | None:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return None
    try:
        pair = base64.b64decode(value.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return pair.partition(":")[2]
