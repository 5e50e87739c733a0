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
        self._mask: np.ndarray | None = (
            None  # u32[W], made once: there may be as many ids as tokens
        )

    def needs_mask(self, num_output_tokens: int) -> bool:
        del num_output_tokens
        return True

    def fill(self, output_token_ids: Sequence[int], mask: np.ndarray) -> None:
        del output_token_ids
        if self._mask is None or len(self._mask) != len(mask):
            self._mask = np.full(len(mask), 0xFFFFFFFF, np.uint32)
            allow_only(self._mask, self._token_ids)
        mask &= self._mask


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
        last_ids: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            last_ids.setdefault(tuple(word[:-1]), set()).add(word[-1])
        self._last_ids = {first: sorted(last) for first, last in last_ids.items()}
        self._lengths = sorted({len(first) for first in last_ids})  # of what comes before the last

    def needs_mask(self, num_output_tokens: int) -> bool:
        return bool(self._lengths) and num_output_tokens >= self._lengths[0]

    def fill(self, output_token_ids: Sequence[int], mask: np.ndarray) -> None:
        for length in self._lengths:
            if length > len(output_token_ids):
                return
            end = tuple(output_token_ids[len(output_token_ids) - length :])
            clear_ids(mask, self._last_ids.get(end, ()))
