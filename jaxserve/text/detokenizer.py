"""Token ids to text, one id at a time: `IncrementalDetokenizer`. Called by `text.watcher`, one per
sequence.

Invariant: the texts returned by `push` and one final `flush`, joined, are `decode(all ids)` to the
    character. So
nothing is returned that a later id could still change: half a character waits for its other half,
and a run of byte-fallback tokens waits for its end (one bad byte turns the whole run into U+FFFD).

Only a short window of ids is decoded each time. Its first ids are text that was returned already:
they are there because decoders treat the first token differently (they strip its leading space),
and that must not hit a new one.

    ids      o o o o o o | a a a a | n n p
                         ^ window starts here, at an edge between characters
             returned long ago | anchor, returned | new | pending: half a character
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

REPLACEMENT = "\ufffd"
_NUM_ANCHOR_TOKENS = 4
_MAX_WINDOW_TOKENS = 12
_NUM_EDGES_TRIED = 8  # more than the ids of one character


class Delta(NamedTuple):
    """What one `feed` made known.

    Args:
        text: new text, in whole characters.
        spans: one (start, end) for each id whose text is now returned in full, in id order;
            character offsets into the whole text. An id without text of its own (a piece of a
            character, a skipped special) has start = end.
    """

    text: str
    spans: list[tuple[int, int]]


def _never(token_id: int) -> bool:
    return False


def _common_prefix_length(a: str, b: str) -> int:
    if b.startswith(a):
        return len(a)
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _char_of_each_byte(text: str, num_bytes: int) -> list[int]:
    """The character of `text` that each token of a byte-fallback run belongs to.

    A valid run has as many bytes as its UTF-8 form; an invalid one became one U+FFFD a byte. Where
    neither count fits (the decoder stripped a space), all tokens count as the first character's.
    """
    widths = [len(char.encode()) for char in text]
    if sum(widths) != num_bytes:
        widths = [1] * num_bytes if len(text) == num_bytes else [num_bytes]
    return [index for index, width in enumerate(widths) for _ in range(width)]


class IncrementalDetokenizer:
    """Decodes a growing list of ids without decoding it whole again.

    Args:
        decode: ids -> text; a pure function of the ids.
        is_skipped: whether `decode` leaves this id out before it looks at the others (a special
            token that is skipped, an id outside the vocabulary).
        is_byte: whether this id is a byte-fallback token, whose run is decoded as one.
        num_unstable_chars: how many characters at the end of `decode`'s text a later id may still
            change, besides an incomplete character.

    Source: the prefix and read offsets of text-generation-inference (Hugging Face), here with a
        check that the window
    starts between characters, which makes it exact for invalid UTF-8 too.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        is_skipped: Callable[[int], bool] = _never,
        is_byte: Callable[[int], bool] = _never,
        num_unstable_chars: int = 0,
    ) -> None:
        self._decode = decode
        self._is_skipped = is_skipped
        self._is_byte = is_byte
        self._num_unstable_chars = num_unstable_chars
        self._window: list[int] = []
        self._text = ""  # decode(window), without an open byte run
        self._offset = 0  # where _text begins in the whole text
        self._num_returned = 0  # characters of the whole text returned so far
        self._starts: deque[int] = deque()  # of the ids whose spans are not returned, rising
        self._run: list[
            bool
        ] = []  # the open byte run: True = a byte token, False = a skipped id within it
        self._min_window = _NUM_ANCHOR_TOKENS + num_unstable_chars
        self._max_window = _MAX_WINDOW_TOKENS + 2 * num_unstable_chars
        self._trim_at = self._max_window

    def push(self, token_id: int) -> str:
        """Take the next id; returns the text that is now certain, in whole characters, often none."""
        return self.feed(token_id).text

    def flush(self) -> str:
        """The ids ended: returns the text still held, with U+FFFD for what never became a
        character.
        """
        return self.finish().text

    def feed(self, token_id: int) -> Delta:
        """`push`, with the spans of the ids that are now certain."""
        if self._is_byte(token_id):
            self._window.append(token_id)
            self._run.append(True)
            return Delta("", [])
        if self._is_skipped(token_id):
            if self._run:
                self._run.append(False)
                return Delta("", [])
            self._starts.append(self._offset + len(self._text))
            return Delta("", self._settle())
        if self._run:
            self._close_run()
        self._window.append(token_id)
        self._starts.append(self._advance())
        delta = self._return_text(self._num_stable_chars())
        self._trim()
        return delta

    def finish(self) -> Delta:
        """`flush`, with the spans of the ids that had none yet."""
        if self._run:
            self._close_run()
        return self._return_text(len(self._text))

    def pending_starts(self) -> list[int]:
        """Where the text of each id without a span begins, in id order; an open byte run is not in
        it.
        """
        return list(self._starts)

    def _advance(self) -> int:
        """Decode the window; returns where the text changed, in the whole text, and pulls later
        starts back there.
        """
        before, self._text = self._text, self._decode(self._window)
        start = self._offset + _common_prefix_length(before, self._text)
        for index in range(len(self._starts) - 1, -1, -1):
            if self._starts[index] <= start:
                break
            self._starts[index] = start
        return start

    def _close_run(self) -> None:
        start = self._advance()
        run_text = self._text[start - self._offset :]
        chars = iter(_char_of_each_byte(run_text, sum(self._run)))
        char = 0
        for is_byte in self._run:
            char = next(chars) if is_byte else char
            self._starts.append(start + char)
        self._run = []

    def _num_stable_chars(self) -> int:
        # An incomplete character shows as exactly one U+FFFD, at the end; any other U+FFFD is there
        # to stay.
        num_incomplete = 1 if self._text.endswith(REPLACEMENT) else 0
        return max(0, len(self._text) - max(num_incomplete, self._num_unstable_chars))

    def _return_text(self, num_stable_chars: int) -> Delta:
        text = self._text[self._num_returned - self._offset : num_stable_chars]
        self._num_returned += len(text)
        return Delta(text, self._settle())

    def _settle(self) -> list[tuple[int, int]]:
        spans = []
        while self._starts:
            end = self._starts[1] if len(self._starts) > 1 else self._offset + len(self._text)
            if end > self._num_returned:
                break
            spans.append((self._starts.popleft(), end))
        return spans

    def _trim(self) -> None:
        """Drop ids from the front of the window, at an edge where both sides decode as they do
        together.

        A wrong edge cannot pass: bytes of one character decoded apart give more characters than
        together.
        """
        if len(self._window) < self._trim_at:
            return
        most_kept = min(self._min_window + _NUM_EDGES_TRIED, len(self._window))
        for num_kept in range(self._min_window, most_kept):
            head = self._decode(self._window[:-num_kept])
            tail = self._decode(self._window[-num_kept:])
            rest = self._text[len(head) :]
            stripped = rest[: len(rest) - len(tail)]
            num_dropped = len(self._text) - len(tail)
            num_anchor_chars = self._num_returned - self._offset - num_dropped
            is_edge = self._text.startswith(head) and rest.endswith(tail) and not stripped.strip()
            if is_edge and num_anchor_chars > self._num_unstable_chars:
                self._window = self._window[-num_kept:]
                self._text = tail
                self._offset += num_dropped
                self._trim_at = self._max_window
                return
        # No edge (one long character of many ids, say): look again when there is much more to look
        # at.
        self._trim_at = 2 * len(self._window)
