"""How likely the tokens of a prompt are: what is wanted of a sequence, what is known of it, and which
part a cache may not serve. Held by the sequences of a request; a step's part of it stands in its plan.

    prompt   | skipped ....... | known ......... | unknown ................ |
             0                 first             next_position              num_tokens

Token i is scored by the step that computes token i - 1, whatever chunk that falls into. Only tokens
before the first unknown one's predecessor may come from a cache: its predecessor has to be computed.

Invariant: `next_position` goes back only where other weights take over, so a sequence that was preempted,
or whose step was cut short, scores again only what is not known.
"""

import numpy as np

from jaxserve.request import PromptLogprob


class PromptScores:
    """The scores of one prompt; the choices of a request share it.

    Args:
        num_tokens: of the prompt.
        start: the first position wanted; position 0 has nothing before it and no score.
        num_top: likeliest tokens wanted of each position.
    """

    def __init__(self, *, num_tokens: int, start: int, num_top: int):
        self.first = max(1, start)
        self.num_tokens = num_tokens
        self.num_top = num_top
        self.next_position = self.first
        num_scored = max(0, num_tokens - self.first)
        self._logprobs = np.zeros(num_scored, np.float32)
        self._ranks = np.zeros(num_scored, np.int32)
        self._top_ids = np.zeros((num_scored, num_top), np.int32)
        self._top_logprobs = np.zeros((num_scored, num_top), np.float32)
        self._result: list[PromptLogprob | None] | None = None

    @property
    def is_complete(self) -> bool:
        return self.next_position >= self.num_tokens

    @property
    def most_reused(self) -> int | None:
        """Computed tokens that may be taken from elsewhere, the first so many; None = any."""
        return None if self.is_complete else self.next_position - 1

    def put(
        self,
        first: int,
        logprobs: np.ndarray,
        ranks: np.ndarray,
        top_ids: np.ndarray | None = None,
        top_logprobs: np.ndarray | None = None,
    ) -> None:
        """Takes in the scores of consecutive positions from `first` on, which is not beyond
        `next_position`.

        Args:
            first: their first position.
            logprobs, ranks, top_ids, top_logprobs: as in `batch.TokenScores`.
        """
        if first > self.next_position:
            raise ValueError(
                f"scores from position {first} on, but position {self.next_position} is not known"
            )
        end = first + len(logprobs)
        where = slice(first - self.first, end - self.first)
        self._logprobs[where] = logprobs
        self._ranks[where] = ranks
        if self.num_top:
            assert top_ids is not None
            assert top_logprobs is not None
            self.num_top = min(self.num_top, top_ids.shape[1])  # a small vocabulary has fewer
            self._top_ids[where, : self.num_top] = top_ids[:, : self.num_top]
            self._top_logprobs[where, : self.num_top] = top_logprobs[:, : self.num_top]
        self.next_position = max(self.next_position, end)

    def start_over(self) -> None:
        """Forgets what is known, while some is not: other weights compute all of it."""
        if not self.is_complete:
            self.next_position = self.first

    def result(self) -> list[PromptLogprob | None] | None:
        """One entry per token of the prompt, None before the first wanted position; the same list
        each time. None while something is unknown.
        """
        if self._result is None and self.is_complete:
            pairs = zip(
                self._top_ids[:, : self.num_top].tolist(),
                self._top_logprobs[:, : self.num_top].tolist(),
                strict=True,
            )
            tops = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]
            values = zip(self._logprobs.tolist(), tops, self._ranks.tolist(), strict=True)
            known = [PromptLogprob(*one) for one in values]
            self._result = [*[None] * (self.num_tokens - len(known)), *known]
        return self._result
