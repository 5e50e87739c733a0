"""`ChoiceGroup`: a request that samples, with one sequence per choice.

Choice 0 computes the prompt. When its first token is there the others are forked from it and share
the prompt's pages; each computes the prompt's last token again (into its own copy of that page) and
draws from a seed of its own.

    choice 0   waiting -> running ------------- first token --> ...
    choice i   not known to the scheduler yet        \\-> forked: waiting -> running --> ...

Invariant: until then exactly one choice that has not ended is known to the scheduler, the first
such one ("the leader"); afterwards all of them are.
"""

from array import array
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace

from jaxserve.errors import InvalidRequestError
from jaxserve.field_checks import require_within
from jaxserve.groups.group import NON_FINITE, Group
from jaxserve.groups.outbox import Outbox
from jaxserve.request import CompletionOutput, Request
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.sequence import Sequence, Status
from jaxserve.text.watcher import Observation, TokenWatcher

HELD_AFTER = ("stop", "length")  # these leave pages that a fork can use


@dataclass(kw_only=True, eq=False, slots=True)
class Choice:
    """One of a request's outputs and how much of it has been released.

    Args:
        index: which one.
        seq: its sequence.
        watcher: turns its ids into text and may end it; None = ids only.
        num_observed: output tokens that the watcher has seen.
        num_released: how many of them were made ready for the caller.
        finish_reason: how it ended; None while it has not.
        num_shown: how often the watcher was asked. More than num_observed once that was cut short:
            such a watcher cannot be trusted any more.
    """

    index: int
    seq: Sequence
    watcher: TokenWatcher | None
    num_observed: int = 0
    num_released: int = 0
    finish_reason: str | None = None
    num_shown: int = 0

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None

    def observe(self, index: int) -> Observation:
        """Shows output token number `index`, from 0, to the watcher."""
        if self.watcher is None:
            return Observation(text="", num_tokens=1, stop_reason=None, stopped=False)
        self.num_shown += 1
        return self.watcher.observe([self.seq.token_ids[self.seq.num_prompt_tokens + index]])

    def hides(self, reason: str) -> bool:
        """Whether the token that ends it for this reason has no part in the text: the watcher is not
        shown it, so what is held is released before it, and nothing is cut for its sake."""
        params = self.seq.request.sampling_params
        is_shown = self.watcher is None or params.include_stop_str_in_output
        return reason == "stop" and not is_shown

    def flush(self) -> Observation | None:
        """What the watcher still holds; it is not asked again."""
        if self.watcher is None:
            return None
        self.num_shown += 1
        return self.watcher.flush()

    def completion(
        self, seen: Several[Observation], reason: str | None, stop_reason: str | int | None
    ) -> CompletionOutput:
        """What these observations release, behind what was released before."""
        seq = self.seq
        begin = self.num_released
        end = begin + sum(one.num_tokens for one in seen)
        first = seq.num_prompt_tokens
        params = seq.request.sampling_params
        return CompletionOutput(
            index=self.index,
            text="".join(one.text for one in seen),
            token_ids=seq.token_ids[first + begin : first + end].tolist(),
            logprobs=seq.logprobs[begin:end] if params.wants_logprobs else None,
            top_logprobs=seq.top_logprobs[begin:end] if seq.num_top_logprobs else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            weights_versions=seq.weights_versions(begin, end),
        )


class ChoiceGroup(Group):
    """A request in flight that samples.

    Args:
        seqs: one per choice, in order; `order[1]` of each is its index.
        watchers: one per choice, or none at all.
        scheduler: runs the sequences.
        outbox: takes what they release.
    """

    def __init__(
        self,
        seqs: Several[Sequence],
        watchers: Several[TokenWatcher | None],
        *,
        scheduler: Scheduler,
        outbox: Outbox,
    ):
        super().__init__(seqs[0], scheduler)
        self.outbox = outbox
        self.choices = [
            Choice(index=index, seq=seq, watcher=watcher)
            for index, (seq, watcher) in enumerate(zip(seqs, watchers, strict=True))
        ]
        self.has_spread = len(self.choices) == 1
        self.wants_logprobs = seqs[0].request.sampling_params.wants_logprobs
        for choice in self.choices:  # the others have to be forked before the first one goes on
            choice.seq.is_awaited = not self.has_spread

    @property
    def has_ended(self) -> bool:
        if len(self.choices) == 1:  # most of them, asked in every step
            return self.choices[0].finish_reason is not None
        return all(choice.has_ended for choice in self.choices)

    @property
    def first_scheduled_s(self) -> float | None:
        # The prompt is computed by the first choice that was not aborted before its turn came.
        times = [choice.seq.first_scheduled_s for choice in self.choices]
        return min((s for s in times if s is not None), default=None)

    @property
    def held(self) -> list[Sequence]:
        if not self.request.hold:
            return []
        return [c.seq for c in self.choices if c.finish_reason in HELD_AFTER]

    def start(self, parent: Sequence | None, num_tokens: int) -> None:
        if self.first.max_tokens == 0:  # and nothing is to be scored either
            for choice in self.choices:
                choice.finish_reason = "length"
            self.outbox.ready[self] = [
                choice.completion([], "length", None) for choice in self.choices
            ]
        elif parent is None:
            self.scheduler.add(self.first)
        else:
            self.scheduler.fork(parent, self.first, num_tokens)

    def advance(self, seqs: Several[Sequence]) -> None:
        for seq in seqs:
            if self.request.sampling_params.max_tokens == 0:
                self._end_unshown()
                continue
            if not self.has_spread:
                self._spread(seq)
            self._take_tokens(self.choices[seq.order[1]])

    def take_plain_token(self, seq: Sequence) -> bool:
        choice = self.choices[seq.order[1]]
        if choice.watcher is not None or not self.has_spread:
            return False
        count = choice.num_observed + 1
        if len(seq.logprobs) != count or count >= seq.max_tokens:
            return False  # always so where no tokens were asked for
        token_id = seq.token_ids[len(seq.prompt_token_ids) + choice.num_observed]
        if token_id in seq.stop_ids:
            return False
        output = CompletionOutput(
            choice.index,
            "",
            [token_id],
            seq.logprobs[-1:] if self.wants_logprobs else None,
            None,
            None,
            None,
            seq.top_logprobs[-1:] if seq.num_top_logprobs else None,
            [seq.version_starts[-1][1]],
        )
        ready = self.outbox.ready
        news = [*ready.get(self, ()), output]
        # Stores and no call in one statement: no interrupt can come between them.
        ready[self], choice.num_observed, choice.num_released = news, count, choice.num_released + 1
        return True

    def _end_unshown(self) -> None:
        """Ends a request for no tokens: its prompt was computed and scored, what was sampled behind it
        is nobody's.
        """
        going_on = self._going_on()
        for choice in going_on:
            self._commit(choice, choice.completion([], "length", None), num_observed=0)
        self.scheduler.finish(going_on[0].seq)

    def _spread(self, leader: Sequence) -> None:
        """Gives the other choices what was computed of the prompt."""
        self.has_spread = True  # first: if the forks are cut short, all of them start over
        for choice in self.choices:
            choice.seq.is_awaited = False
        for choice in self._going_on():
            if choice.seq is not leader:
                self.scheduler.fork(leader, choice.seq, leader.num_prompt_tokens)

    def _take_tokens(self, choice: Choice) -> None:
        """Looks at the tokens a choice just got: makes ready what may be handed out, and ends it at
        the first that ends it; what follows that one is dropped.
        """
        seen: list[Observation] = []
        ending = None
        num_observed = 0
        for index in range(choice.num_observed, choice.seq.num_output_tokens):
            ending = choice.seq.ending(index + 1)
            num_observed += 1
            if ending is not None and choice.hides(ending[0]):
                break
            seen.append(choice.observe(index))
            if ending is not None or seen[-1].stopped:
                break
        if seen and seen[-1].stopped:
            output = choice.completion(seen, "stop", seen[-1].stop_reason)
        elif ending is not None:
            output = self._last(choice, *ending, *seen)
        else:
            output = choice.completion(seen, None, None)
        self._commit(choice, output, num_observed=num_observed)
        if output.finish_reason is not None:
            if self.request.hold:
                self.scheduler.hold(choice.seq)
            else:
                self.scheduler.finish(choice.seq)

    def _last(
        self, choice: Choice, reason: str, stop_reason: str | int | None, *seen: Observation
    ) -> CompletionOutput:
        """The output that ends a choice, with what its watcher still holds."""
        rest = choice.flush()
        if rest is None:
            return choice.completion(seen, reason, stop_reason)
        if rest.stopped:  # the very last characters, held until now, complete a stop string
            reason, stop_reason = "stop", rest.stop_reason
        elif choice.hides(reason):
            rest = replace(rest, num_tokens=rest.num_tokens + 1)
        return choice.completion([*seen, rest], reason, stop_reason)

    def _commit(self, choice: Choice, output: CompletionOutput, *, num_observed: int) -> None:
        """Makes an output ready and records that it is."""
        if not (output.token_ids or output.text or output.finish_reason is not None):
            choice.num_observed += num_observed
            return
        ready = self.outbox.ready
        news = [*ready.get(self, ()), output]
        after = (
            choice.num_observed + num_observed,
            choice.num_released + len(output.token_ids),
            output.finish_reason,
        )
        # As above.
        ready[self], (choice.num_observed, choice.num_released, choice.finish_reason) = news, after

    def fail(self, seq: Sequence) -> None:
        # Before the first token all choices depend on the one that computes the prompt.
        lost = [self.choices[seq.order[1]]] if self.has_spread else self._going_on()
        for choice in lost:
            self._commit(
                choice, self._last(choice, "error", seq.fault or NON_FINITE), num_observed=0
            )
        self.scheduler.finish(seq)

    def check_index(self, index: object) -> None:
        require_within("index", index, 0, len(self.choices) - 1)

    def abort(self, index: int | None) -> None:
        if index is not None:
            self._abort(self.choices[index])
            return
        for choice in reversed(self.choices):  # the leader last: it need not hand over
            self._abort(choice)

    def _abort(self, choice: Choice) -> None:
        if choice.has_ended:
            return
        leader, *others = self._going_on()
        is_known = self.has_spread or choice is leader
        if is_known and not self.has_spread and others:
            self.scheduler.fork(leader.seq, others[0].seq, leader.seq.num_prompt_tokens)
        self._commit(choice, self._last(choice, "abort", None), num_observed=0)
        if is_known:
            self.scheduler.finish(choice.seq)

    def rewind(self) -> list[Sequence]:
        for choice in self._going_on():
            if choice.num_shown > choice.num_observed:
                self._commit(choice, choice.completion([], "abort", None), num_observed=0)
            choice.seq.rewind(choice.num_observed)
        for seq in self.held:
            seq.status = Status.HELD  # it was, or was about to be
        known = self._going_on() if self.has_spread else self._going_on()[:1]
        return [*self.held, *(choice.seq for choice in known)]

    def branch_point(self, index: int) -> tuple[Sequence, array]:
        self.check_index(index)
        choice = self.choices[index]
        seq = choice.seq
        if not choice.has_ended:
            if not self.has_spread:
                return self._going_on()[0].seq, seq.token_ids
            return seq, seq.token_ids
        if seq not in self.held:
            raise InvalidRequestError(
                f"choice {index} of request {self.request.id!r} has ended "
                f"({choice.finish_reason}) and is not held",
                param="index",
            )
        return seq, seq.token_ids[: seq.num_prompt_tokens + choice.num_released]

    def check_invariants(self) -> None:
        for number, choice in enumerate(self._going_on()):
            seq = choice.seq
            assert choice.num_released <= choice.num_observed == seq.num_output_tokens
            assert self.has_spread or number == 0 or seq.num_computed_tokens == 0
            assert seq.status not in (Status.HELD, Status.FINISHED), "a choice has ended unseen"
        for seq in self.held:
            assert seq.status is Status.HELD, "a held choice runs"

    def _going_on(self) -> list[Choice]:
        return [choice for choice in self.choices if not choice.has_ended]


def one_watcher_per_choice(
    watcher: TokenWatcher | Several[TokenWatcher] | None, request: Request
) -> list[TokenWatcher] | list[None]:
    """The watchers of a request's choices; None for each when there is none.

    Raises:
        InvalidRequestError: stop strings without a watcher to find them.
        ValueError: another number of them than there are choices.
    """
    num_choices = request.sampling_params.n
    if watcher is None:
        if request.sampling_params.stop:
            raise InvalidRequestError(
                "stop strings need a tokenizer; without one use stop_token_ids", param="stop"
            )
        return [None] * num_choices
    watchers = list(watcher) if isinstance(watcher, Several) else [watcher]
    if len(watchers) != num_choices:
        raise ValueError(
            f"watcher: request {request.id!r} has n = {num_choices} choices and needs a watcher for "
            f"each, got {len(watchers)}"
        )
    return watchers
