"""The static shapes a step may take. One ladder picks buckets, for warm-up and for run time alike.

A bucket is a pair (T, R): T tokens in the step, R rows that need logits. The forward program
depends on T alone and the sampling program on R alone, so len(tokens) + len(rows) programs serve
every pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """Compiled shapes of a step: T tokens and R logit rows."""

    num_tokens: int
    num_rows: int


def ladder(limit: int) -> tuple[int, ...]:
    """Powers of two below `limit`, then `limit` itself: (1, 2, 4, ..., limit)."""
    if limit < 1:
        raise ValueError(f"a ladder needs a limit of at least 1, got {limit}")
    rungs = [1]
    while rungs[-1] * 2 < limit:
        rungs.append(rungs[-1] * 2)
    return tuple(rungs) if rungs[-1] == limit else (*rungs, limit)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The ladders of one engine.

    Args:
        max_num_seqs: most sequences in a step (S); also the most logit rows.
        max_num_batched_tokens: most tokens in a step.
        tokens: rungs of T, ascending; the last is max_num_batched_tokens.
        rows: rungs of R, ascending; the last is max_num_seqs.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    tokens: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def make(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tokens: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
    ) -> "Buckets":
        """The ladders for these limits. A token budget below max_num_seqs lowers the latter.

        Args:
            max_num_seqs, max_num_batched_tokens: the limits.
            tokens, rows: ladders that end with them; None = powers of two.
        """
        max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        return cls(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tokens=tuple(tokens or ladder(max_num_batched_tokens)),
            rows=tuple(rows or ladder(max_num_seqs)),
        )

    def pick(self, num_tokens: int, num_rows: int) -> Bucket:
        """The smallest bucket that holds a step.

        Raises:
            ValueError: no bucket does; a plan never asks for one.
        """
        return Bucket(_rung(self.tokens, num_tokens, "tokens"), _rung(self.rows, num_rows, "rows"))


def _rung(rungs: tuple[int, ...], need: int, what: str) -> int:
    for rung in rungs:
        if need <= rung:
            return rung
    raise ValueError(f"{need} {what} pass the largest bucket of {rungs[-1]}")
