"""What the engine knows of text: `TokenWatcher`, and `StopWatcher`, the one that looks for stop
strings.

The engine shows every sampled id to the sequence's watcher and gives the user only what the watcher
releases, so ids, text, logprobs and usage are cut in one place. A request without a tokenizer has
no watcher.

Invariants: released text never contains a stop string; an id is released when all of its text is;
    joined over a
sequence's life the released text is the decoded text of the released ids, unless a stop string cut
it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.text.detokenizer import Delta, IncrementalDetokenizer
from jaxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Observation:
    """What one call to a watcher released.

    Args:
        text: newly released text.
        num_tokens: how many ids are newly released, the oldest unreleased ones first. It may be
            more than were just observed (earlier ids were held) or fewer; after a stop the ids that
            are left are dropped.
        stop_reason: the stop string that was found, or None.
        stopped: whether the sequence has to end.
    """

    text: str
    num_tokens: int
    stop_reason: str | None
    stopped: bool


class TokenWatcher(Protocol):
    """Looks at one sequence's output as it is sampled."""

    def observe(self, token_ids: Sequence[int]) -> Observation:
        """Take newly sampled ids, in order; may stop inside them, and then drops the rest."""
        ...

    def flush(self) -> Observation:
        """The sequence ended for another reason: release all that is held.

        Text that was held as half a character may complete a stop string even now: then `stopped`
        is true.
        """
        ...


class StopWatcher:
    """Detokenizes one sequence, holds back what may become a stop string, and cuts where one is
    complete.

    When the text of an id completes several stop strings, the one that begins first wins, and of
    those that begin at the same place the shortest, because finer tokens would have met it first.
    The order of `stop` never matters.

    An id is kept if its text begins before the cut. The cut is where the stop string begins, or
    where it ends if `include_stop_str_in_output`; text behind it in the same token is dropped.

    Args:
        tokenizer: the tokenizer, or a plain ids -> text function.
        stop: stop strings, none of them empty.
        include_stop_str_in_output: cut behind the stop string instead of before it.
        skip_special_tokens: leave special tokens out of the text (their ids are released all the
            same); without effect on a plain function.
        min_tokens: look for stop strings only behind the text of so many ids; these are always
            released.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Callable[[list[int]], str],
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        if isinstance(tokenizer, Tokenizer):
            self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        else:
            self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = tuple(stop)
        self._max_held_chars = max(map(len, self._stops), default=1) - 1
        self._include_stop = include_stop_str_in_output
        self._held = ""  # known text that is not released
        self._num_released_chars = 0
        self._num_released_ids = 0
        self._min_tokens = min_tokens
        self._num_spans = 0
        self._search_from = None if min_tokens else 0  # offset into the text; None = not known yet
        self._spans: deque[tuple[int, int]] = deque()  # ids whose text is known but not released
        self._stop_reason: str | None = None

    def observe(self, token_ids: Sequence[int]) -> Observation:
        """Take newly sampled ids, in order.

        Args:
            token_ids: ids of the vocabulary; those behind a stop are dropped.

        Returns:
            What is now released. Watching ids one by one or together releases the same in the end.
        """
        texts: list[str] = []
        num_tokens = 0
        for token_id in token_ids:
            if self._stop_reason is not None:
                break
            text, count = self._release(self._detokenizer.feed(token_id), is_last=False)
            texts.append(text)
            num_tokens += count
        return self._observation("".join(texts), num_tokens)

    def flush(self) -> Observation:
        """The sequence ended for another reason: release all that is held (nothing after a stop)."""
        if self._stop_reason is not None:
            return self._observation("", 0)
        return self._observation(*self._release(self._detokenizer.finish(), is_last=True))

    def _observation(self, text: str, num_tokens: int) -> Observation:
        return Observation(text, num_tokens, self._stop_reason, self._stop_reason is not None)

    def _release(self, delta: Delta, *, is_last: bool) -> tuple[str, int]:
        self._held += delta.text
        self._spans.extend(delta.spans)
        self._num_spans += len(delta.spans)
        if self._search_from is None and self._num_spans >= self._min_tokens:
            self._search_from = self._spans[self._min_tokens - self._num_spans - 1][1]
        found = self._find_stop() if delta.text else None
        if found is not None:
            return self._cut(*found)
        num_kept_back = 0 if is_last else self._num_chars_to_hold()
        text = self._held[: len(self._held) - num_kept_back]
        self._held = self._held[len(text) :]
        self._num_released_chars += len(text)
        num_tokens = 0
        while self._spans and self._spans[0][1] <= self._num_released_chars:
            self._spans.popleft()
            num_tokens += 1
        self._num_released_ids += num_tokens
        return text, num_tokens

    @property
    def _begin(self) -> int:
        """Where in the held text a stop string may begin; its end, where none may yet."""
        if self._search_from is None:
            return len(self._held)
        return max(0, self._search_from - self._num_released_chars)

    def _find_stop(self) -> tuple[int, str] | None:
        # A stop string cannot begin before the held text: its beginning would have been held.
        begin = self._begin
        found = [(self._held.find(stop, begin), stop) for stop in self._stops]
        return min(
            ((start, stop) for start, stop in found if start >= 0),
            key=lambda match: (match[0], len(match[1])),
            default=None,
        )

    def _cut(self, start: int, stop: str) -> tuple[str, int]:
        text = self._held[: start + len(stop) if self._include_stop else start]
        cut = self._num_released_chars + len(text)
        starts = [span[0] for span in self._spans] + self._detokenizer.pending_starts()
        self._stop_reason = stop
        self._held = ""
        self._spans.clear()
        num_tokens = sum(token_start < cut for token_start in starts)
        return text, max(num_tokens, self._min_tokens - self._num_released_ids)

    def _num_chars_to_hold(self) -> int:
        """Length of the longest end of the held text that a stop string longer than it begins with."""
        for length in range(min(self._max_held_chars, len(self._held) - self._begin), 0, -1):
            end = self._held[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
