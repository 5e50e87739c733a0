"""/v1/models and /v1/models/{id}: the one model, under each of its names."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.server.state import ServerState


def routes(state: ServerState) -> list[Route]:
    """The routes of this module."""

    def card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "jaxserve",
            "root": state.served_names[0],
            "parent": None,
            "max_model_len": state.model.max_model_len,
        }

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card(n) for n in state.served_names]})

    async def one_model(request: Request) -> Response:
        return JSONResponse(card(state.check_model(request.path_params["name"])))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        # A name may hold a slash, as those of a hub do.
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
    ]
