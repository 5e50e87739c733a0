"""The JSON object of a request's body, read and parsed within the limits.

Called through `ServerState.body`. The size limit itself is held by `body_limits`, which every route is
behind. Invariant: the time that it takes grows with the size of the body alone, whatever stands in it.
"""

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request

from jaxserve.server.config import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, MAX_JSON_MEMBERS
from jaxserve.server.errors import ApiError

_SLICE_BYTES = 2**18  # looked at in one go


async def read_object(request: Request) -> dict[str, object]:
    """The body as a JSON object. It can be read once: nothing of it is kept.

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
        # Not `request.body()`, which keeps what it read for as long as the request lasts.
        return parse_object(b"".join([part async for part in request.stream()]))
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body was complete") from None


def parse_object(body: bytes) -> dict[str, object]:
    """A JSON object from bytes.

    Raises:
        ApiError: 400: it is no JSON, no object, nested deeper than MAX_JSON_DEPTH, or made of more than
            MAX_JSON_CONTAINERS objects and arrays or MAX_JSON_MEMBERS members.
    """
    _check_nesting(body)
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


def _check_nesting(body: bytes) -> None:
    """Holds the limits on how deep objects and arrays lie in each other, and how many there are and have
    members: each takes far more time and memory than its bytes.
    """
    num_brackets = body.count(b"[") + body.count(b"{")
    if num_brackets <= MAX_JSON_DEPTH and body.count(b":") <= MAX_JSON_MEMBERS:
        return
    # What is left of a string's quotes are those around it. JSON has no backslashes elsewhere.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    depth = num_containers = num_members = num_quotes = 0
    for start in range(0, len(plain), _SLICE_BYTES):
        chars = np.frombuffer(plain, np.uint8, min(_SLICE_BYTES, len(plain) - start), start)
        quotes = np.cumsum(chars == ord('"'), dtype=np.int32) + num_quotes
        is_outside = quotes % 2 == 0
        opens = ((chars == ord("[")) | (chars == ord("{"))) & is_outside
        closes = ((chars == ord("]")) | (chars == ord("}"))) & is_outside
        depths = np.cumsum(opens.astype(np.int32) - closes, dtype=np.int32) + depth
        if depths.max() > MAX_JSON_DEPTH:
            raise ApiError(
                400,
                f"the body's JSON must be nested at most {MAX_JSON_DEPTH} deep",
                code="json_too_deep",
            )
        num_containers += int(np.count_nonzero(opens))
        num_members += int(np.count_nonzero((chars == ord(":")) & is_outside))
        depth, num_quotes = int(depths[-1]), int(quotes[-1]) % 2
    for num, most, what in (
        (num_containers, MAX_JSON_CONTAINERS, "objects and arrays"),
        (num_members, MAX_JSON_MEMBERS, "members of objects"),
    ):
        if num > most:
            message = f"the body's JSON must have at most {most} {what}, got {num}"
            raise ApiError(400, message, code="json_too_large")


def _reason(body: bytes, error: Exception) -> str:
    """The parser's own words; but of half a surrogate pair it says that the text was cut off."""
    text = str(error)
    if "truncated" in text and body.rstrip().endswith(b"}"):
        return "it is cut off, or a string holds half of a surrogate pair"
    return text
