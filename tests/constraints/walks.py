"""Random texts of a grammar: at each token, any that the mask allows is as likely as any other."""

from collections.abc import Sequence

import numpy as np

from jaxserve.constraints.constraint import Constraint, ids_mask, num_words


def allowed_ids(constraint: Constraint, tokens: Sequence[int], vocab_size: int) -> list[int]:
    """What may follow these output tokens."""
    return _allowed(constraint, tokens, vocab_size).tolist()


def _allowed(constraint: Constraint, tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    mask = ids_mask(num_words(vocab_size), vocab_size)
    constraint.fill(tokens, mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def walk(
    constraint: Constraint,
    rng: np.random.Generator,
    *,
    end_ids: Sequence[int],
    vocab_size: int,
    max_tokens: int,
) -> list[int]:
    """Output tokens up to an end token, which is among them, or to max_tokens."""
    tokens: list[int] = []
    while len(tokens) < max_tokens and (not tokens or tokens[-1] not in end_ids):
        tokens.append(int(rng.choice(_allowed(constraint, tokens, vocab_size))))
    return tokens
