"""Constraints that need no text: sets of token ids that may come, or may not. See `constraint`.

Made by `groups.make` for each sequence that asks for one. They remember nothing.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.constraints.constraint import allow_only, clear_ids


class AllowedTokens:
    """Nothing but these may ever come.

    Args:
        token_ids: at least one, each inside the vocabulary.
    """

    def __init__(self, token_ids: Sequence[int]):
        self._token_ids = token_ids

    def needs_mask(self, num_output_tokens: int) -> bool:
        del num_output_tokens
        return True

    def fill(self, output_token_ids: Sequence[int], mask: np.ndarray) -> None:
        del output_token_ids
        allow_only(mask, self._token_ids)


class MinTokens:
    """What would end a sequence may not come before it has so many output tokens.

    Args:
        min_tokens: output tokens; the prompt does not count.
        end_ids: what ends the sequence, each inside the vocabulary.
    """

    def __init__(self, min_tokens: int, end_ids: Iterable[int]):
        self._min_tokens = min_tokens
        self._end_ids = tuple(end_ids)

    def needs_mask(self, num_output_tokens: int) -> bool:
        return num_output_tokens < self._min_tokens

    def fill(self, output_token_ids: Sequence[int], mask: np.ndarray) -> None:
        if self.needs_mask(len(output_token_ids)):
            clear_ids(mask, self._end_ids)


class BadWords:
    """Runs of tokens that may not be completed: the last of a run may not come behind the others.

    Only the output counts: a run that begins in the prompt is none.

    Args:
        words: the runs, each of at least one id, all inside the vocabulary.
    """

    def __init__(self, words: Iterable[Sequence[int]]):
        runs = {tuple(word) for word in words}
        self._single_ids = tuple(sorted(run[0] for run in runs if len(run) == 1))
        self._runs = sorted(run for run in runs if len(run) > 1)
        # The fewest output tokens behind which there may be something to forbid.
        self._least = (
            0 if self._single_ids else min((len(run) - 1 for run in self._runs), default=0)
        )

    def needs_mask(self, num_output_tokens: int) -> bool:
        return num_output_tokens >= self._least

    def fill(self, output_token_ids: Sequence[int], mask: np.ndarray) -> None:
        last = [run[-1] for run in self._runs if _ends_with(output_token_ids, run[:-1])]
        clear_ids(mask, [*self._single_ids, *last])


def _ends_with(token_ids: Sequence[int], end: Sequence[int]) -> bool:
    return tuple(token_ids[-len(end) :]) == tuple(end)
