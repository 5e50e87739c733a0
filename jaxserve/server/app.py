"""`make_app`: the ASGI application, from the features' routes and what every request passes first.

    counts, request id, access line -> (CORS) -> errors -> host -> key -> limits -> exit stack -> routes

A feature is a module with `routes(state)` and a line in `_FEATURES`. Invariant: every reply but a
feature's own is OpenAI's error object, whatever went wrong, and carries X-Request-Id.
"""

import asyncio
import contextlib
import logging

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server import health, metrics, models, tokenize
from jaxserve.server.auth import Auth
from jaxserve.server.body_limits import BodyLimits
from jaxserve.server.dashboard import routes as dashboard
from jaxserve.server.errors import as_api_error, internal_error
from jaxserve.server.hosts import Hosts
from jaxserve.server.openai import chat, completions, openapi
from jaxserve.server.request_ids import RequestIds, request_id_of
from jaxserve.server.slow_readers import ClientGoneError, SlowReaders
from jaxserve.server.state import ServerState

_FEATURES = (health, models, tokenize, completions, chat, openapi, metrics, dashboard)

logger = logging.getLogger("jaxserve.server")


def all_routes(state: ServerState) -> list[BaseRoute]:
    """The routes of every feature."""
    return [route for feature in _FEATURES for route in feature.routes(state)]


def make_app(state: ServerState) -> ASGIApp:
    """The server's ASGI application."""
    routes = all_routes(state)
    app: ASGIApp = ExitStacks(Router(routes, redirect_slashes=False))
    app = SlowReaders(BodyLimits(app, state.config), state.config.send_timeout_s)
    app = Auth(app, state.config.api_key_digests)
    app = Hosts(app, state.config)
    app = ErrorReplies(app)
    if state.config.cors_allow_origins:
        app = CORSMiddleware(
            app,
            allow_origins=state.config.cors_allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    return metrics.HttpCounts(RequestIds(app), state.metrics, routes)


class ExitStacks:
    """Gives each request a stack of what has to be undone at its end, and the time of its arrival."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        async with contextlib.AsyncExitStack() as stack:
            scope.setdefault("state", {}).update(
                exit_stack=stack, arrived_s=asyncio.get_running_loop().time()
            )
            await self._app({**scope, "app": self}, receive, send)


class ErrorReplies:
    """Answers what was raised with OpenAI's error object."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except (ClientGoneError, ClientDisconnect):
            await asyncio.sleep(0)  # lets the connection see that it is closed
        except Exception as error:  # the last frame before the client
            reply = as_api_error(error)
            if reply is None:
                logger.exception("request %s failed", request_id_of(scope))
                reply = internal_error()
            if has_begun:  # the status is out: all that is left is to end the connection
                raise
            await reply.response()(scope, receive, send)
