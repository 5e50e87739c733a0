"""`ApiError` and OpenAI's error object: what every failed request is answered with.

Raised by every handler, caught in one place (`app.py`; behind the first byte of a stream by whoever
writes the stream). Invariant: a message tells what the client did, never a path, an address or a
traceback of this process.
"""

import http
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from jaxserve.errors import EngineDeadError, InvalidRequestError, RequestError

RETRY_AFTER_S = 1
# Why stands in the log: it may name what is none of a client's business.
ENGINE_DEAD = "the engine is gone: nothing is served any more"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request that ends with an error.

    Args:
        status: the HTTP status.
        message: what a user needs to know.
        type: OpenAI's error type; None = the usual one of the status.
        param: the field at fault, or None.
        code: a short machine-readable reason, or None.
        headers: of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(
            status, "invalid_request_error" if status < 500 else "server_error"
        )
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The reply's JSON: {"error": {message, type, param, code}}."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole reply."""
        return JSONResponse(self.body(), self.status, self.headers)


def unavailable(message: str, code: str) -> ApiError:
    """503: nothing is served now (loading, draining, dead)."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def as_api_error(error: BaseException) -> ApiError | None:
    """The error object of an exception; None for one that nobody expected: the caller logs it, and
    answers with `internal_error`.
    """
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, error.message, type=error.type, param=error.param, code=error.code)
        case EngineDeadError():
            return unavailable(ENGINE_DEAD, "engine_dead")
        case RequestError():
            return ApiError(500, error.message, type=error.type, param=error.param, code=error.code)
        case HTTPException():
            return _of_status(error)
    return None


def internal_error() -> ApiError:
    """500 without details: they stand in the log, beside the request's id."""
    return ApiError(500, "the server failed to answer this request", code="internal_error")


def _of_status(error: HTTPException) -> ApiError:
    phrase = http.HTTPStatus(error.status_code).phrase
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = {404: "there is no such URL here", 405: "this URL takes another method"}.get(
        error.status_code, phrase
    )
    return ApiError(error.status_code, message, code=code, headers=error.headers)
