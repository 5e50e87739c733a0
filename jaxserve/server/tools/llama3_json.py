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

from jaxserve.server.tools.call_reader import CallReader
from jaxserve.server.tools.deltas import BLANK, Delta, DeltaCollector

TAG = "<|python_tag|>"
SEPARATOR = ";"
_OTHER_KEYS = ("type",)


class Llama3JsonParser:
    """See `ToolParser` and `make_parser`."""

    def __init__(
        self, *, live: bool, max_calls: int | None = None, new_id: Callable[[], str]
    ) -> None:
        self._live = live
        self._out = DeltaCollector(new_id=new_id, max_calls=max_calls, separators=SEPARATOR)
        self._reader: CallReader | None = None
        self._held: list[str] = []  # the tag and blanks behind it: content, if no call follows
        self._matched = 0  # characters of the tag
        self._at_line = True  # a call may begin here
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
            self._out.text(TAG[: self._matched])
        else:
            self._give_up()
        return self._out.finish()

    def _in_text(self, char: str) -> None:
        if char == TAG[self._matched]:
            self._matched += 1
            if self._matched == len(TAG):
                self._matched = 0
                self._held = [TAG]
                self._take = self._behind_tag
            return
        if self._matched:  # "<" stands at the beginning of the tag alone
            self._out.text(TAG[: self._matched])
            self._matched = 0
            self._at_line = False
            self._in_text(char)
        elif char == "{" and self._at_line:
            self._begin_call(char, is_tagged=False)
        else:
            self._out.text(char)
            self._at_line = self._out.is_blank or char == "\n"

    def _behind_tag(self, char: str) -> None:
        if char == "{":
            self._begin_call(char, is_tagged=True)
        elif char in BLANK:
            self._held.append(char)
        else:
            self._give_up()
            self._in_text(char)

    def _begin_call(self, char: str, *, is_tagged: bool) -> None:
        self._reader = CallReader(
            self._out, live=self._live, needs_arguments=not is_tagged, other_keys=_OTHER_KEYS
        )
        self._take = self._in_call
        self._in_call(char)

    def _in_call(self, char: str) -> None:
        assert self._reader is not None
        if not self._reader.push(char):
            self._give_up()
            self._in_text(char)
        elif self._reader.is_whole:
            self._reader = None
            self._held = []
            self._at_line = True
            self._take = self._in_text

    def _give_up(self) -> None:
        """What was held back is no call."""
        self._take = self._in_text
        text = "" if self._reader is None else self._reader.give_up()
        if text is not None:
            self._out.text("".join(self._held) + text)
        self._at_line = False
        self._reader = None
        self._held = []
