"""`Constraint`: what a sequence may say next, as a mask of bits; and how several become one.

A mask is u32[W], W = ceil(vocabulary / 32): bit i % 32 of word i // 32 is 1 where token i may come
next. Bits beyond the vocabulary mean nothing.

Read by the step loop, which makes the masks of a step on the host while the device runs its forward
pass. Pure host code.

Invariant: a combined mask always leaves a token of the vocabulary, so nothing can be sampled that no
constraint but a weaker one forbids, and no sequence can get stuck.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

BITS = 32  # of a word


class Constraint(Protocol):
    """Decides which tokens may follow. One per sequence: it may remember how far it is."""

    def needs_mask(self, num_output_tokens: int) -> bool:
        """Whether the token after `num_output_tokens` output tokens may need a mask. Cheap, and asked
        before the values of those tokens are known; False means that `fill` would clear nothing.
        """
        ...

    def fill(self, output_token_ids: Sequence[int], mask: np.ndarray) -> None:
        """Clears in a mask what may not follow.

        Depends on its arguments alone: a constraint may remember how far it is, but goes back when
        the tokens say so (a rewind, a preemption, a fork).

        Args:
            output_token_ids: all output tokens so far, without the prompt.
            mask: u32[W], all ones; written in place.
        """
        ...


class Grammar(Constraint, Protocol):
    """A constraint on the whole of a text, which a branch of the sequence goes on with."""

    def branch(self, output_token_ids: Sequence[int]) -> "Grammar":
        """What the text after these output tokens has to keep to, for a sequence that has them in its
        prompt.

        Raises:
            InvalidRequestError: these tokens leave the grammar.
        """
        ...


def num_words(vocab_size: int) -> int:
    """W, the words of a mask for so many tokens."""
    return -(-vocab_size // BITS)


def combine_masks(
    constraints: Iterable[Constraint],
    output_token_ids: Sequence[int],
    mask: np.ndarray,
    vocab_size: int,
) -> None:
    """Writes what all constraints of a sequence leave.

    They are taken in turn, the strongest first. One that would leave no token at all, after those
    before it, gives way: it is passed over for this token, so there is never a deadlock.

    Args:
        constraints: of one sequence, the strongest first.
        output_token_ids: its output so far.
        mask: u32[W], written in place; what it holds means nothing.
        vocab_size: ids in [0, vocab_size) may be sampled at all.
    """
    mask[:] = ids_mask(len(mask), vocab_size)
    for constraint in constraints:
        if not constraint.needs_mask(len(output_token_ids)):
            continue
        own = np.full(len(mask), 0xFFFFFFFF, np.uint32)
        constraint.fill(output_token_ids, own)
        own &= mask
        if own.any():
            mask[:] = own


def ids_mask(size: int, vocab_size: int) -> np.ndarray:
    """u32[size] with the first `vocab_size` bits set."""
    mask = np.zeros(size, np.uint32)
    whole, rest = divmod(vocab_size, BITS)
    mask[:whole] = 0xFFFFFFFF
    if rest:
        mask[whole] = (1 << rest) - 1
    return mask


def clear_ids(mask: np.ndarray, token_ids: Iterable[int]) -> None:
    """Clears the bits of some tokens.

    Args:
        mask: u32[W], changed in place.
        token_ids: of any tokens; those behind the mask's last bit are passed over.
    """
    ids = _within(mask, token_ids)
    np.bitwise_and.at(mask, ids // BITS, ~_bits(ids))


def allow_only(mask: np.ndarray, token_ids: Iterable[int]) -> None:
    """Clears the bits of all tokens but some.

    Args:
        mask: u32[W], changed in place.
        token_ids: of any tokens; those behind the mask's last bit are passed over.
    """
    ids = _within(mask, token_ids)
    allowed = np.zeros_like(mask)
    np.bitwise_or.at(allowed, ids // BITS, _bits(ids))
    mask &= allowed


def allows(mask: np.ndarray, token_id: int) -> bool:
    """Whether a token's bit is set in u32[W]."""
    return bool(mask[token_id // BITS] >> np.uint32(token_id % BITS) & np.uint32(1))


def _within(mask: np.ndarray, token_ids: Iterable[int]) -> np.ndarray:
    """i64, the ids that have a bit: an end id of a checkpoint may lie beyond its vocabulary."""
    ids = np.fromiter(token_ids, np.int64)
    return ids[ids < BITS * len(mask)]


def _bits(ids: np.ndarray) -> np.ndarray:
    """u32, each id's own bit of its word."""
    return np.uint32(1) << (ids % BITS).astype(np.uint32)
