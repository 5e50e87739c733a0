"""What one step will do: a named plan between the scheduler, which decides, and the batch, which is sent."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.pages.kv_manager import Pairs
from jaxserve.schedule.buckets import Bucket
from jaxserve.schedule.sequence import Sequence


@dataclass(slots=True)  # made for every sequence of every step: a tuple is three times as dear
class ScheduledSlice:
    """A run of one sequence's tokens to compute in this step. Never changed.

    Args:
        seq: the sequence; its pages already hold `start + num_tokens` tokens.
        start: first position computed, equal to seq.next_position when it was planned.
        num_tokens: positions computed; 1 is what people call decode, more is a chunk.
        num_samples: tokens sampled at the end of the slice: 1 if it reaches the last known token, else 0.
    """

    seq: Sequence
    start: int
    num_tokens: int
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step.

    Args:
        slices: ordered as the kernels want their rows: by num_tokens, then by context length.
        bucket: the compiled shapes it runs in.
        num_tokens: of all slices.
        num_steps: more than 1 where every slice is one token that samples: so many tokens of each
            sequence are computed one after the other, each from the one before, with no host
            between.
        is_awaited: the host has to see what it samples before the next step can be planned: a beam's
            candidates, the first token of a request with several choices.
        moves_out: (device page, host page) pairs, done first of all.
        copies: (source page, target page) pairs, done next; no target is a source of another.
        moves_in: (host page, device page) pairs, done last before the step.
    """

    slices: tuple[ScheduledSlice, ...]
    bucket: Bucket
    num_tokens: int
    num_steps: int = 1
    is_awaited: bool = False
    moves_out: Pairs = ()
    copies: Pairs = ()
    moves_in: Pairs = ()

    @property
    def is_void(self) -> bool:
        """Whether it was sent, and all of its sequences have ended since."""
        return not any(one.seq.num_in_flight or one.seq.num_pending for one in self.slices)

    @property
    def num_padding_tokens(self) -> int:
        return self.bucket.num_tokens - self.num_tokens


class StepResult(NamedTuple):
    """What became of a step's sequences.

    Args:
        advanced: those that got a token, or candidates for one, in plan order.
        failed: those whose hidden states or logits were NaN or infinite. Nothing of this step was
            kept of them, and they have to be ended.
    """

    advanced: list[Sequence]
    failed: list[Sequence]
