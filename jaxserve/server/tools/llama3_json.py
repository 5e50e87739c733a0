"""Calls as Llama 3.1 and later write them: `Llama3JsonParser`.

    {"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}
    <|python_tag|>{"name": "f", "parameters": {...}}

Rules: a call stands at the beginning of the text or of a line, behind another call (with or without a
semicolon), or behind the tag. It has name and parameters (or arguments), may say its type, and nothing
else: any other JSON is content. Behind the tag the parameters may be missing. What breaks off is content,
the tag included.

Invariant: each character of the text is looked at a bounded number of times.
"""

from collections.abc import Callable

from jaxserve.server.tools.deltas import BLANK
from jaxserve.server.tools.marked_text import MarkedText

TAG = "<|python_tag|>"
SEPARATOR = ";"
_OTHER_KEYS = ("type",)


class Llama3JsonParser(MarkedText):
    """See `ToolParser` and `make_parser`."""

    def __init__(
        self, *, live: bool, max_calls: int | None = None, new_id: Callable[[], str]
    ) -> None:
        super().__init__(TAG, separators=SEPARATOR, live=live, max_calls=max_calls, new_id=new_id)
        self._at_line = True  # a call may begin here

    def _begin_mark(self) -> None:
        self._take = self._behind_tag

    def _in_plain_text(self, char: str) -> None:
        if char == "{" and self._at_line:
            self._begin_call(char, needs_arguments=True, other_keys=_OTHER_KEYS)
        else:
            self._out.text(char)
            self._at_line = self._out.is_blank or char == "\n"

    def _had_text(self) -> None:
        self._at_line = False

    def _behind_tag(self, char: str) -> None:
        if char == "{":
            self._begin_call(char, needs_arguments=False, other_keys=_OTHER_KEYS)
        elif char in BLANK:
            self._held.append(char)
        else:
            self._give_up()
            self._in_text(char)

    def _end_call(self) -> None:
        self._at_line = True
        self._take = self._in_text
