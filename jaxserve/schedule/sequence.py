"""A sequence on its way through the engine: tokens, progress, pages, and when to stop.

Made by the engine at the border, moved between states by the scheduler. There is no prefill or
decode phase: one number, `num_computed_tokens`, says how far the KV pages reach.

    token_ids   | prompt ........ | output ............... | pending |
                | computed ....... | in flight | to compute          |
                0                  num_computed_tokens   next_position   len(token_ids)

A step that was scheduled and whose result is not known yet leaves two marks: its tokens are *in
flight*, and each token that it will sample is *pending*. A pending token stands in `token_ids` as
-1 - r, where r is its logit row in that step: what the device reads where the next step needs the
token before the host has seen it. Every known output token has a logprob, and no pending one.
"""

import enum
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxserve.constraints.constraint import Constraint
from jaxserve.pages.page_table import PageTable
from jaxserve.pages.tiers import HostPages
from jaxserve.request import CacheSalt, Request
from jaxserve.schedule.scoring import PromptScores


class Status(enum.Enum):
    WAITING = "waiting"  # never admitted yet; a fork may own pages meanwhile
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again
    HELD = "held"  # neither runs nor waits, keeps its pages while they are not needed
    FINISHED = "finished"


class Namespace(NamedTuple):
    """What two sequences must have in common before one may use pages that the other computed.

    Args:
        weights_version: counts changes of the weights.
        cache_salt: kind-tagged, from the request.
        adapter: None; there are no adapters yet.
    """

    weights_version: int
    cache_salt: CacheSalt | str | None
    adapter: str | None


TopLogprobs = list[tuple[int, float]]  # (token id, natural-log probability), best first


class Candidates(NamedTuple):
    """The likeliest next tokens of a sequence, best first.

    Args:
        token_ids: i32[K].
        logprobs: f32[K], natural logs under the raw logits.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray

    def top(self, count: int) -> TopLogprobs:
        """The first `count` of them, or all if there are fewer."""
        ids, logprobs = self.token_ids[:count].tolist(), self.logprobs[:count].tolist()
        return list(zip(ids, logprobs, strict=True))


# With slots, because every step reads and writes each of them several times.
@dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One sequence of a request.

    Args:
        request: what was asked; its sampling params are read at every step.
        prompt_token_ids: its prompt, copied: the caller may go on to change the list it gave. An
            array('i') holds millions of tokens of a simulation in a tenth of the memory.
        order: (arrival, branch): a smaller one is older. Forks of one request share its arrival.
        seed: 64 bits from which every draw of this sequence comes.
        max_tokens: output budget after clamping to the context and to the pool.
        stop_ids: ids that end it: the end set (unless ignore_eos) and the request's stop_token_ids.
        page_table: its pages.
        wants_candidates: it is a beam: steps fill `candidates`, and whoever chooses appends.
        constraints: what its tokens must keep to, the strongest first.
        num_top_logprobs: likeliest tokens to keep of each output token; 0 = none.
        scores: of its prompt, where they are wanted; shared by the choices of a request.
    """

    request: Request
    prompt_token_ids: tuple[int, ...] | array
    order: tuple[int, int]
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    page_table: PageTable
    wants_candidates: bool = False
    constraints: tuple[Constraint, ...] = ()
    num_top_logprobs: int = 0
    scores: PromptScores | None = None
    token_ids: array = field(init=False)  # i32[prompt + output]
    logprobs: list[float] = field(init=False, default_factory=list)
    top_logprobs: list[TopLogprobs] = field(init=False, default_factory=list)  # or none at all
    candidates: Candidates | None = field(init=False, default=None)
    num_computed_tokens: int = field(init=False, default=0)
    num_in_flight: int = field(init=False, default=0)  # tokens that the step under way computes
    num_cached_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    num_iterations: int = field(init=False, default=0)  # steps that computed some of it
    num_steps_waited_for_prefix: int = field(init=False, default=0)
    host_pages: HostPages | None = field(init=False, default=None)
    max_num_tokens: int = field(init=False)  # most it can ever compute: the last one sampled is not
    is_awaited: bool = field(init=False)  # what it samples is looked at before another step begins
    first_scheduled_s: float | None = field(init=False, default=None)  # by the engine's clock
    fault: str | None = field(
        init=False, default=None
    )  # the field that nothing can follow any more
    # (first output token that weights of a version sampled, that version), ascending
    version_starts: list[tuple[int, int]] = field(init=False, default_factory=list)
    status: Status = field(init=False, default=Status.WAITING)

    def __post_init__(self) -> None:
        self.token_ids = array("i", self.prompt_token_ids)
        self.is_awaited = self.wants_candidates
        self.max_num_tokens = len(self.prompt_token_ids) + self.max_tokens - 1

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Of the prompt and sampled, without the pending ones."""
        return len(self.prompt_token_ids) + len(self.logprobs)

    @property
    def num_pending(self) -> int:
        """Tokens at the end that the step under way will sample."""
        return len(self.token_ids) - len(self.prompt_token_ids) - len(self.logprobs)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, as far as the host knows."""
        return len(self.logprobs)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) : self.num_known_tokens].tolist()

    @property
    def has_ended(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def num_matchable(self) -> int:
        """How far pages that others have computed may serve it, and one token more, which it computes
        itself: all that it has, but where prompt tokens are scored only what lies before them.
        """
        most = None if self.scores is None else self.scores.most_reused
        return len(self.token_ids) if most is None else most + 1

    @property
    def matchable_token_ids(self) -> array:
        """These tokens."""
        num_tokens = self.num_matchable
        whole = num_tokens == len(self.token_ids)
        return self.token_ids if whole else self.token_ids[:num_tokens]

    @property
    def next_position(self) -> int:
        """Where the next step goes on."""
        return self.num_computed_tokens + self.num_in_flight

    @property
    def num_tokens_to_compute(self) -> int:
        """At least 1 while the sequence waits or runs: its last token's KV is never computed yet.
        0 only for a beam that has, or is about to get, its candidates and waits for the choice.
        """
        return len(self.token_ids) - self.num_computed_tokens - self.num_in_flight

    @property
    def awaits_its_end(self) -> bool:
        """Whether its last token is pending: no further step is needed, only the result."""
        return len(self.token_ids) > self.max_num_tokens and self.num_pending > 0

    def needs_mask(self, num_output_tokens: int) -> bool:
        """Whether a constraint may have a say in the token after so many output tokens."""
        return any(one.needs_mask(num_output_tokens) for one in self.constraints)

    def forget_step(self) -> None:
        """Takes back the marks of a step under way: nobody wants its result any more."""
        del self.token_ids[self.num_known_tokens :]
        self.num_in_flight = 0

    def begin_version(self, version: int) -> None:
        """Says that what is sampled from here on is sampled by weights of this version; what others
        have computed of the next token, or of the prompt's scores while some are missing, is dropped.
        """
        starts = self.version_starts
        if starts and starts[-1][1] != version:
            self.candidates = None
            if self.scores is not None:
                self.scores.start_over()
        while starts and starts[-1][0] >= self.num_output_tokens:
            starts.pop()
        if not starts or starts[-1][1] != version:
            starts.append((self.num_output_tokens, version))

    def weights_versions(self, begin: int, end: int) -> list[int]:
        """The version of the weights that sampled each of the output tokens [begin, end)."""
        if end <= begin:  # it may never have been queued
            return []
        first, version = self.version_starts[-1]
        if begin >= first:
            return [version] * (end - begin)
        versions: list[int] = []
        for first, version in self.version_starts:
            versions[first:] = [version] * (end - first)
        return versions[begin:end]

    def append(self, token_id: int, logprob: float) -> None:
        """Takes a chosen token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.candidates = None

    def rewind(self, num_output_tokens: int) -> None:
        """Drops the tokens sampled after the first `num_output_tokens`; they will be sampled again."""
        del self.logprobs[num_output_tokens:]
        del self.top_logprobs[num_output_tokens:]
        while self.version_starts and self.version_starts[-1][0] > num_output_tokens:
            self.version_starts.pop()
        self.forget_step()
        self.candidates = None

    def ending(self, num_output_tokens: int) -> tuple[str, int | None] | None:
        """(finish_reason, stop token id) if output token number `num_output_tokens` ends the
        sequence, else None.

        The id is given for the request's own stop_token_ids; the model's end set ends with None.
        """
        last = self.token_ids[len(self.prompt_token_ids) + num_output_tokens - 1]
        if last in self.stop_ids:
            own = last in self.request.sampling_params.stop_token_ids
            return "stop", last if own else None
        if num_output_tokens >= self.max_tokens:
            return "length", None
        return None
