"""The page at / and what it reads: GET /dashboard/state?since=N.

Both need a key like everything else; a browser asks for it when it opens the page (`auth`). Invariant:
the page loads nothing from elsewhere and runs no script but its own: its Content-Security-Policy says so.
"""

import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.server.dashboard.feed import Feed
from jaxserve.server.dashboard.files import FILES
from jaxserve.server.errors import ApiError
from jaxserve.server.state import ServerState

STATE_PATH = "/dashboard/state"
MAX_STEP = 2**53

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def routes(state: ServerState) -> list[Route]:
    """The routes of this module; none with --nodashboard."""
    if not state.config.dashboard:
        return []
    feed = Feed(state)

    async def view(request: Request) -> Response:
        found = await feed.view(_since(request.query_params.get("since", "0")))
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return JSONResponse(found, headers=headers)

    files = [_file_route(path, *found) for path, found in FILES.items()]
    return [*files, Route(STATE_PATH, view, methods=["GET"])]


def _file_route(path: str, name: str, media_type: str) -> Route:
    content = resources.files("jaxserve.server.dashboard").joinpath(name).read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**SECURITY_HEADERS, "ETag": etag, "Cache-Control": "no-cache"}

    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers={**headers, "Content-Type": media_type})

    return Route(path, file, methods=["GET"])


def _since(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= MAX_STEP):
        raise ApiError(400, f"since must be a number of a step in [0, {MAX_STEP}]", param="since")
    return int(text)
