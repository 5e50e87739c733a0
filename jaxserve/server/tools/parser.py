"""The interface of tool parsers, and which there are: `make_parser`, `detect_parser`.

Called by `openai.chat`, one parser for each choice; `serve` detects the format at the start.

Invariant: a streamed reply and a whole one come out of the same parser, so they are equal.
"""

import secrets
from collections.abc import Callable
from typing import Protocol

from jaxserve.errors import ConfigError, shown
from jaxserve.server.tools.deltas import ContentDelta, Delta, ToolCallDelta
from jaxserve.server.tools.hermes import HermesParser
from jaxserve.server.tools.llama3_json import Llama3JsonParser

__all__ = ["PARSERS", "ContentDelta", "ToolCallDelta", "ToolParser", "detect_parser", "make_parser"]

PARSERS = ("hermes", "llama3_json")


class ToolParser(Protocol):
    """Reads calls out of the text of one choice, as it comes."""

    def feed(self, text: str) -> list[Delta]:
        """What this much more text releases; text that may belong to a call is held back."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back, when the text has ended; a call that is not whole becomes content."""
        ...


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def make_parser(
    name: str,
    *,
    live: bool = False,
    max_calls: int | None = None,
    new_id: Callable[[], str] = new_call_id,
) -> ToolParser:
    """A parser for one choice.

    Args:
        name: one of PARSERS.
        live: hand arguments out while they are written. For text that a grammar holds to the format:
            a call that was cut off (finish_reason "length") cannot become content any more. Otherwise a
            call is handed out when its object is whole.
        max_calls: calls beyond are left out; None = any number.
        new_id: gives the id of a call.

    Raises:
        ConfigError: no parser has that name.
    """
    if name == "hermes":
        return HermesParser(live=live, max_calls=max_calls, new_id=new_id)
    if name == "llama3_json":
        return Llama3JsonParser(live=live, max_calls=max_calls, new_id=new_id)
    raise ConfigError(f"tool_call_parser must be one of {', '.join(PARSERS)}, got {shown(name)}")


def detect_parser(chat_template: str | None) -> str | None:
    """The format in which a chat template asks for calls, or None if it is none of PARSERS.

    Args:
        chat_template: Jinja source; where there are several, the one used with tools.
    """
    source = chat_template or ""
    if "<tool_call>" in source:
        is_other = any(mark in source for mark in ("<function=", "<arg_key>"))
        return "hermes" if "arguments" in source and not is_other else None
    if "<|python_tag|>" in source or ('"parameters": dictionary' in source):
        return "llama3_json"
    return None
