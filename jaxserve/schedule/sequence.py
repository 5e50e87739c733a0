"""A sequence on its way through the engine: tokens, progress, pages, and when to stop.

Made by the engine at the border, moved between states by the scheduler. There is no prefill or
decode phase: one number, `num_computed_tokens`, says how far the KV pages reach.

    token_ids   | prompt ........ | output ...... |
                | computed ...........|  to compute  |      a step computes num_scheduled_tokens of these
                0                     num_computed_tokens    len(token_ids)
"""

import enum
from dataclasses import dataclass, field

from jaxserve.pages.page_table import PageTable
from jaxserve.request import Request


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, its pages given up
    FINISHED = "finished"


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One sequence of a request.

    Args:
        request: what was asked; its sampling params are read at every step.
        prompt_token_ids: its prompt, copied: the caller may go on to change the list it gave.
        arrival: position in arrival order; a smaller number is older and is never made to wait for
            a younger one.
        seed: 64 bits from which every draw of this sequence comes.
        max_tokens: output budget after clamping to the context and to the pool.
        stop_ids: ids that end it: the end set (unless ignore_eos) and the request's stop_token_ids.
        page_table: its pages, empty while it waits.
    """

    request: Request
    prompt_token_ids: tuple[int, ...]
    arrival: int
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    page_table: PageTable
    token_ids: list[int] = field(init=False)
    logprobs: list[float] = field(init=False, default_factory=list)
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    status: Status = field(init=False, default=Status.WAITING)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        """At least 1 while the sequence lives: its last token's KV is never computed yet."""
        return len(self.token_ids) - self.num_computed_tokens

    def append(self, token_id: int, logprob: float) -> None:
        """Takes a sampled token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)

    def rewind(self, num_output_tokens: int) -> None:
        """Drops the tokens sampled after the first `num_output_tokens`; they will be sampled again."""
        del self.token_ids[self.num_prompt_tokens + num_output_tokens :]
        del self.logprobs[num_output_tokens:]

    def ending(self) -> tuple[str, int | None] | None:
        """(finish_reason, stop token id) if the last token ends the sequence, else None.

        The id is given for the request's own stop_token_ids; the model's end set ends with None.
        """
        last = self.token_ids[-1]
        if last in self.stop_ids:
            own = last in self.request.sampling_params.stop_token_ids
            return "stop", last if own else None
        if self.num_output_tokens >= self.max_tokens:
            return "length", None
        return None
