"""/health, /ping, /version and /load: how the server is, for load balancers and people.

/health is open (see `auth`), so it tells a state and nothing else.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import jaxserve
from jaxserve.server.state import ServerState


def routes(state: ServerState) -> list[Route]:
    """The routes of this module."""

    async def health(request: Request) -> Response:
        refusal = state.refusal()
        return Response(status_code=200) if refusal is None else refusal.response()

    async def version(request: Request) -> Response:
        return JSONResponse({"version": jaxserve.__version__})

    async def load(request: Request) -> Response:
        return JSONResponse({"server_load": state.num_requests})

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/load", load, methods=["GET"]),
    ]
