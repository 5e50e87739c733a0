"""What a tool parser makes of a model's text, piece by piece. Used by the parsers and by `openai`.

Invariant: the content of all pieces joined, and the arguments of all pieces of one index joined, do not
    depend on how the text was cut.
"""

from collections.abc import Callable
from dataclasses import dataclass

BLANK = " \t\r\n"


@dataclass(frozen=True)
class ContentDelta:
    """More of the message's text."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of one call.

    Args:
        index: of the call in its message, from 0 up.
        id: of the call, in its first piece; None in the others.
        name: of the function, in its first piece; None in the others.
        arguments: more of the JSON object's text; may be empty.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = ContentDelta | ToolCallDelta


class DeltaCollector:
    """Joins what a parser finds into deltas, and leaves out the blanks around calls.

    Text before and after calls is kept as it is, but text made of blanks alone is none: the line break
    between two calls, or what follows the last one.

    Args:
        new_id: gives the id of a call.
        max_calls: calls beyond are left out; None = any number.
        separators: what may stand between two calls and is no text, beside blanks.
    """

    def __init__(
        self, *, new_id: Callable[[], str], max_calls: int | None = None, separators: str = ""
    ) -> None:
        self._new_id = new_id
        self._max_calls = max_calls
        self._separators = separators
        self._deltas: list[Delta] = []
        self._content: list[str] = []  # not in a delta yet
        self._blanks: list[str] = []  # held back: whether they are text is not known
        self._num_calls = 0
        self.is_blank = True  # nothing but blanks since the beginning or the last call

    def text(self, text: str) -> None:
        """Adds text that belongs to no call."""
        if not text:
            return
        if self.is_blank:
            separators = self._separators if self._num_calls else ""
            if not text.strip(BLANK + separators):
                self._blanks.append(text)
                return
            self._content += self._blanks
            self._blanks.clear()
            self.is_blank = False
        self._content.append(text)

    def begin_call(self, name: str, arguments: str) -> None:
        """Adds a call and the first part of its arguments."""
        self._blanks.clear()
        self.is_blank = True
        index = self._num_calls
        self._num_calls += 1
        if self._is_wanted(index):
            self._flush_content()
            self._deltas.append(ToolCallDelta(index, self._new_id(), name, arguments))

    def more_arguments(self, text: str) -> None:
        """Adds to the arguments of the last call."""
        index = self._num_calls - 1
        if text and self._is_wanted(index):
            self._deltas.append(ToolCallDelta(index, None, None, text))

    def take(self) -> list[Delta]:
        """The deltas since the last time."""
        self._flush_content()
        taken, self._deltas = self._deltas, []
        return taken

    def finish(self) -> list[Delta]:
        """The last deltas: blanks that stood in a message without calls are its text."""
        if not self._num_calls:
            self._content += self._blanks
        self._blanks.clear()
        return self.take()

    def _is_wanted(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls

    def _flush_content(self) -> None:
        if self._content:
            self._deltas.append(ContentDelta("".join(self._content)))
            self._content.clear()
