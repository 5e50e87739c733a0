"""The JSON object of a request's body, read and parsed within the limits.

Called through `ServerState.body`. The size limit itself is held by `body_limits`, which every route is
behind.
"""

import re

import msgspec
from starlette.requests import ClientDisconnect, Request

from jaxserve.server.config import MAX_JSON_DEPTH
from jaxserve.server.errors import ApiError

# Strings are stepped over as a whole, so that only brackets outside of them are seen; one pass.
_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)|[\[{]|[\]}]', re.DOTALL)


async def read_object(request: Request) -> dict[str, object]:
    """The body as a JSON object.

    Raises:
        ApiError: 415, it is said to be something else; 413, it is too large; 400, it is no JSON object,
            or too deep.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"the body must be sent with content-type application/json, got {kind[:80] or 'none'}",
            code="unsupported_media_type",
        )
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(
            415,
            "the body must be sent without content-encoding",
            code="unsupported_media_type",
        )
    try:
        return parse_object(await request.body())
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body was complete") from None


def parse_object(body: bytes) -> dict[str, object]:
    """A JSON object from bytes.

    Raises:
        ApiError: 400: it is no JSON, no object, or nested deeper than MAX_JSON_DEPTH.
    """
    if not _is_shallow(body):
        raise ApiError(
            400,
            f"the body's JSON must be nested at most {MAX_JSON_DEPTH} deep",
            code="json_too_deep",
        )
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ApiError(
            400, f"the body must be valid JSON: {_reason(body, error)}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        raise ApiError(
            400,
            f"the body must be a JSON object, got {kind.get(type(value), 'a number')}",
            code="invalid_json",
        )
    return value


def _is_shallow(body: bytes) -> bool:
    depth = 0
    for found in _BRACKETS.finditer(body):
        first = found[0][:1]
        if first in b"[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                return False
        elif first in b"]}":
            depth -= 1
    return True


def _reason(body: bytes, error: Exception) -> str:
    """The parser's own words; but of half a surrogate pair it says that the text was cut off."""
    text = str(error)
    if "truncated" in text and body.rstrip().endswith(b"}"):
        return "it is cut off, or a string holds half of a surrogate pair"
    return text
