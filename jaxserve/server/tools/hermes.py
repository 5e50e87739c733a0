"""Calls as Hermes, Qwen and SmolLM models write them: `HermesParser`.

    text <tool_call>{"name": "f", "arguments": {...}}</tool_call> ... <tool_call>[{...}, {...}]</tool_call>

Rules: a call counts once its object is whole, also where the closing mark is missing. What stands between
the marks and is no such object is content, marks included, and so is an object that breaks off. A mark
inside a string of the arguments is part of the string.

Invariant: each character of the text is looked at a bounded number of times.
"""

from collections.abc import Callable

from jaxserve.server.tools.call_reader import CallReader
from jaxserve.server.tools.deltas import BLANK, Delta, DeltaCollector

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser:
    """See `ToolParser` and `make_parser`."""

    def __init__(
        self, *, live: bool, max_calls: int | None = None, new_id: Callable[[], str]
    ) -> None:
        self._live = live
        self._out = DeltaCollector(new_id=new_id, max_calls=max_calls)
        self._reader: CallReader | None = None
        self._held: list[str] = []  # since the mark, or behind a call: content, if it is no call
        self._matched = 0  # characters of the mark that is looked for
        self._is_list = False
        self._take = self._in_text

    def feed(self, text: str) -> list[Delta]:
        """See `ToolParser`."""
        for char in text:
            self._take(char)
        if self._reader is not None:
            self._reader.release()
        return self._out.take()

    def finish(self) -> list[Delta]:
        """See `ToolParser`."""
        if self._take == self._in_text:
            self._out.text(OPEN[: self._matched])
        elif self._take != self._behind_call:
            self._give_up()
        return self._out.finish()

    def _in_text(self, char: str) -> None:
        if char == OPEN[self._matched]:
            self._matched += 1
            if self._matched == len(OPEN):
                self._matched = 0
                self._held = [OPEN]
                self._is_list = False
                self._take = self._before_call
            return
        if self._matched:  # "<" stands at the beginning of the mark alone
            self._out.text(OPEN[: self._matched])
            self._matched = 0
            self._in_text(char)
        else:
            self._out.text(char)

    def _before_call(self, char: str) -> None:
        if char == "{":
            self._reader = CallReader(
                self._out, live=self._live, needs_arguments=False, other_keys=None
            )
            self._take = self._in_call
            self._in_call(char)
        elif char in BLANK or (char == "[" and not self._is_list):
            self._is_list = self._is_list or char == "["
            self._held.append(char)
        else:
            self._give_up()
            self._in_text(char)

    def _in_call(self, char: str) -> None:
        assert self._reader is not None
        if not self._reader.push(char):
            self._give_up()
            self._in_text(char)
        elif self._reader.is_whole:
            self._reader = None
            self._held.clear()
            self._take = self._behind_call

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

    def _give_up(self) -> None:
        """What was held back since the mark is no call."""
        self._take = self._in_text
        text = "" if self._reader is None else self._reader.give_up()
        if text is not None:
            self._out.text("".join(self._held) + text)
        self._reader = None
        self._held = []
