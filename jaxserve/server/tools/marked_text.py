"""`MarkedText`: what parsers of calls have in common, whatever their format.

    text  MARK ... {"name": ...} ...  text

`hermes` and `llama3_json` say where a call may begin and what may stand around it. Here the mark is found, a
call is read (`CallReader`), and what turns out to be none becomes content.

Invariant: each character of the text is looked at a bounded number of times.
"""

from collections.abc import Callable, Sequence

from jaxserve.server.tools.call_reader import CallReader
from jaxserve.server.tools.deltas import Delta, DeltaCollector


class MarkedText:
    """A `ToolParser` but for its format.

    Args:
        mark: begins what may be a call; its first character stands nowhere else in it.
        separators: characters between calls that are no content.
        live, max_calls, new_id: as of `make_parser`.
    """

    def __init__(
        self,
        mark: str,
        *,
        separators: str = "",
        live: bool,
        max_calls: int | None,
        new_id: Callable[[], str],
    ) -> None:
        self._mark = mark
        self._live = live
        self._out = DeltaCollector(new_id=new_id, max_calls=max_calls, separators=separators)
        self._reader: CallReader | None = None
        self._held: list[str] = []  # the mark, and what stands behind it: content, if it is no call
        self._matched = 0  # characters of the mark that is looked for
        self._take: Callable[[str], None] = self._in_text

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
            self._out.text(self._mark[: self._matched])
        elif not self._is_behind_call():
            self._give_up()
        return self._out.finish()

    def _in_text(self, char: str) -> None:
        """Looks for the mark."""
        if char == self._mark[self._matched]:
            self._matched += 1
            if self._matched == len(self._mark):
                self._matched = 0
                self._held = [self._mark]
                self._begin_mark()
        elif self._matched:
            self._out.text(self._mark[: self._matched])
            self._matched = 0
            self._had_text()
            self._in_text(char)
        else:
            self._in_plain_text(char)

    def _begin_call(
        self, char: str, *, needs_arguments: bool, other_keys: Sequence[str] | None
    ) -> None:
        """Reads a call from its first character on; see `CallReader`."""
        self._reader = CallReader(
            self._out, live=self._live, needs_arguments=needs_arguments, other_keys=other_keys
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
            self._end_call()

    def _give_up(self) -> None:
        """What was held back since the mark is no call."""
        self._take = self._in_text
        text = "" if self._reader is None else self._reader.give_up()
        if text is not None:
            self._out.text("".join(self._held) + text)
        self._had_text()
        self._reader = None
        self._held = []

    def _begin_mark(self) -> None:
        """The mark is whole: `_take` is set to what reads on."""
        raise NotImplementedError

    def _end_call(self) -> None:
        """A call is whole: `_take` is set to what reads on."""
        raise NotImplementedError

    def _in_plain_text(self, char: str) -> None:
        """Takes a character that begins no mark."""
        self._out.text(char)

    def _had_text(self) -> None:
        """Some of what was held back is content."""

    def _is_behind_call(self) -> bool:
        """Whether what is held back closes a call, so that it is no content at the end."""
        return False
