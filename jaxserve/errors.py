"""The errors users meet. Every message names the field (or file), the value and the limit.

Raised by every layer, caught by the faces (`llm`, `cli`, `server`), which turn them into an exit
code or an error object.
"""

from collections.abc import Iterable

MAX_SHOWN_LENGTH = 100  # characters of a value in a message


def shown(value: object) -> str:
    """A value for an error message: its repr, cut where it would drown the message."""
    if isinstance(value, int) and value.bit_length() > 256:
        return (
            f"an integer of {value.bit_length()} bits"  # Python itself refuses to print the longest
        )
    text = _beginning(value, MAX_SHOWN_LENGTH + 1)
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}..."


def _beginning(value: object, room: int) -> str:
    """The repr of a value, or at least its first `room` characters: a value may be megabytes."""
    if isinstance(value, str | bytes):
        return repr(value[:room])
    if isinstance(value, int) and value.bit_length() > 256:
        return shown(value)
    if type(value) is dict:
        pairs = ((_beginning(k, room), value[k]) for k in value)
        return _joined("{", ((f"{k}: ", v) for k, v in pairs), "}", room)
    if type(value) is list or (type(value) is tuple and len(value) > 1):
        opening, closing = "[]" if type(value) is list else "()"
        return _joined(opening, (("", v) for v in value), closing, room)
    return repr(value)


def _joined(opening: str, items: Iterable[tuple[str, object]], closing: str, room: int) -> str:
    text, separator = opening, ""
    for before, value in items:
        if len(text) > room:
            return text
        text += separator + before + _beginning(value, room)
        separator = ", "
    return text + closing


class JaxserveError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(JaxserveError, ValueError):
    """An engine configuration that cannot be served; raised before anything is loaded or
    allocated.
    """


class CheckpointError(JaxserveError):
    """A checkpoint that cannot be loaded; names the file and tensor, what was expected and what
    was found.
    """


class EngineDeadError(JaxserveError):
    """The engine is gone: its process ended, a step hung, or it was shut down. Nothing more is served."""


class ProcessLostError(JaxserveError):
    """One of several processes that run an engine together is gone, so none of them can go on."""


class RequestError(JaxserveError):
    """One request has no answer; no other request is disturbed.

    Args:
        message: what a user needs to know.
        param: the request field at fault, or None when it is none or the request as a whole.
        code: a short machine-readable reason such as "context_length_exceeded", or None.
    """

    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def to_dict(self) -> dict[str, str | None]:
        """The error object of the OpenAI API: message, type, param, code."""
        return {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }


class InvalidRequestError(RequestError, ValueError):
    """The request is at fault; nothing was allocated for it. The message names the field, its value
    and the limit.
    """

    type = "invalid_request_error"


class NonFiniteError(RequestError):
    """The model computed something that is no finite number; the request is not at fault."""


class ConstraintError(RequestError):
    """Nothing can follow what a sequence has said; only its request ends, with `param` as the stop_reason
    of its finish_reason "error".
    """
