"""/metrics, which tells Prometheus what is counted; and `HttpCounts`, which counts HTTP requests.

What the engine knows is asked of it at the scrape. Invariant: a scrape is answered quickly, with what
was known last, whether the engine answers or not.
"""

import asyncio
import contextlib
from collections.abc import Collection

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import EngineDeadError
from jaxserve.server.measures import Metrics
from jaxserve.server.metric_families import Families, Scrape
from jaxserve.server.state import ServerState
from jaxserve.stats import EngineStats

STATS_TIMEOUT_S = 1.0  # a scrape waits so long for the engine; then it tells what it knew last
CLIENT_LEFT = 499  # nginx's name for a request that was gone before its reply


class HttpCounts:
    """Counts every HTTP request by route, method and status. The outermost middleware.

    Args:
        app: what is behind it.
        metrics: counts.
        routes: all there are; other paths are counted as one.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Collection[BaseRoute]) -> None:
        self._app = app
        self._metrics = metrics
        known = [route for route in routes if isinstance(route, Route)]
        self._plain = frozenset(route.path for route in known if "{" not in route.path)
        self._patterns = [(route.path_regex, route.path) for route in known if "{" in route.path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            self._metrics.http_request(self._handler(scope["path"]), scope["method"], status)

    def _handler(self, path: str) -> str:
        if path in self._plain:
            return path
        return next((name for regex, name in self._patterns if regex.match(path)), "other")


def routes(state: ServerState) -> list[Route]:
    """The routes of this module."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    families = Families(
        model_name=state.served_names[0], with_vllm=state.config.metrics_compat == "vllm"
    )
    registry.register(families)
    last: EngineStats | None = None

    async def metrics(request: HttpRequest) -> Response:
        nonlocal last
        is_healthy = state.is_loaded and state.client.failure is None
        if is_healthy:
            with contextlib.suppress(TimeoutError, EngineDeadError):
                async with asyncio.timeout(STATS_TIMEOUT_S):
                    last = await state.client.stats()
            is_healthy = state.client.failure is None
        families.scrape = Scrape(
            metrics=state.metrics,
            stats=last,
            is_healthy=is_healthy,
            num_refused=state.admission.num_refused if state.is_loaded else 0,
        )
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return [Route("/metrics", metrics, methods=["GET"])]
