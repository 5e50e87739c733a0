"""Calls as Hermes, Qwen and SmolLM models write them: `HermesParser`.

    text <tool_call>{"name": "f", "arguments": {...}}</tool_call> ... <tool_call>[{...}, {...}]</tool_call>

Rules: a call counts once its object is whole, also where the closing mark is missing. What stands between
the marks and is no such object is content, marks included, and so is an object that breaks off. A mark
inside a string of the arguments is part of the string.

Invariant: each character of the text is looked at a bounded number of times.
"""

from collections.abc import Callable

from jaxserve.server.tools.deltas import BLANK
from jaxserve.server.tools.marked_text import MarkedText

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(MarkedText):
    """See `ToolParser` and `make_parser`."""

    def __init__(
        self, *, live: bool, max_calls: int | None = None, new_id: Callable[[], str]
    ) -> None:
        super().__init__(OPEN, live=live, max_calls=max_calls, new_id=new_id)
        self._is_list = False

    def _begin_mark(self) -> None:
        self._is_list = False
        self._take = self._before_call

    def _before_call(self, char: str) -> None:
        if char == "{":
            self._begin_call(char, needs_arguments=False, other_keys=None)
        elif char in BLANK or (char == "[" and not self._is_list):
            self._is_list = self._is_list or char == "["
            self._held.append(char)
        else:
            self._give_up()
            self._in_text(char)

    def _end_call(self) -> None:
        self._take = self._behind_call

    def _is_behind_call(self) -> bool:
        return self._take == self._behind_call

    def _behind_call(self, char: str) -> None:
        """Passes over blanks, and the closing mark with what else closes."""
        if char == CLOSE[self._matched]:
            self._held.append(char)
            self._matched += 1
            if self._matched == len(CLOSE):
                self._matched = 0
                self._take = self._in_text
        elif self._matched == 0 and (char in BLANK or (self._is_list and char in ",]")):
            self._held.append(char)
            if char == ",":
                self._take = self._before_call
            self._is_list = self._is_list and char != "]"
        else:
            held, self._held, self._matched = self._held, [], 0
            self._take = self._in_text
            for one in (*held, char):
                self._in_text(one)
