"""Which names of this server a request may call it by (its Host header): against DNS rebinding.

A page in a browser of this machine may make its own host name point to 127.0.0.1 and then reach a server
there as its own origin. What it cannot change is the Host header, which has the page's name. So where
there are no keys and the server listens on a loopback address, only loopback names are answered, and
those that the operator allows; `--allowed_hosts` sets the same check where it is not by itself.

A middleware of `app`. Invariant: /health, which tells a state and nothing else, is open here as for keys.
"""

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.errors import shown
from jaxserve.server.auth import OPEN_PATHS
from jaxserve.server.config import ServerConfig
from jaxserve.server.errors import ApiError

ANY = "*"


class Hosts:
    """Refuses requests for another host with 403.

    Args:
        app: what is behind it.
        config: host, allowed_hosts and api_key_digests are read.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._allowed = allowed_names(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._allowed is not None:
            given = Headers(scope=scope).getlist("host")
            if scope["path"] not in OPEN_PATHS and not self._allows(given):
                raise ApiError(
                    403,
                    f"this server is not called {shown(' '.join(given))}: it answers to loopback names and "
                    "to those of its flag --allowed_hosts",
                    code="host_not_allowed",
                )
        await self._app(scope, receive, send)

    def _allows(self, given: Sequence[str]) -> bool:
        """Whether this is one name, and ours. Without any it is no browser: those always send one."""
        if not given:
            return True
        name = name_of(given[0])
        return len(given) == 1 and (is_loopback(name) or name in (self._allowed or ()))


def allowed_names(config: ServerConfig) -> frozenset[str] | None:
    """The names that are answered beside loopback ones; None = all names are."""
    if ANY in config.allowed_hosts:
        return None
    if not config.allowed_hosts and (config.api_key_digests or not is_loopback(config.host)):
        return None
    return frozenset(name_of(one) for one in (*config.allowed_hosts, config.host))


def name_of(host: str) -> str:
    """A Host header without its port, in the one form in which names are compared."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    if name.count(":") == 1:
        name = name.partition(":")[0]
    return name.removesuffix(".")


def is_loopback(name: str) -> bool:
    """Whether a name or address can only be this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
