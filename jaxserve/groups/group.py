"""`Group`: a request in flight, with its sequences. The engine drives it; each kind of request is a
subclass.

    start -> [ advance | fail ] * -> has_ended        abort at any time between two steps

Invariant, for an engine that may be interrupted at any line: what a group has released and how far
it is change together, in one statement without a call. `rewind` goes back to that point, so a step
that was cut short can be done again.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence as Several

from jaxserve.request import CompletionOutput, Request, RequestOutput, RequestTimes
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.sequence import Sequence

NON_FINITE = (
    "non_finite_logits"  # the stop_reason of finish_reason "error", where there is no fault
)


class Group(ABC):
    """What all requests have in common.

    Args:
        first: the sequence that computes the prompt.
        scheduler: gets the sequences, and is told when they end.
    """

    def __init__(self, first: Sequence, scheduler: Scheduler):
        self.first = first
        self.scheduler = scheduler
        self.arrival_s = 0.0  # by the engine's clock, which sets it
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def request(self) -> Request:
        return self.first.request

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether nothing of it runs or waits any more."""

    @property
    def held(self) -> list[Sequence]:
        """Ended sequences that keep their pages for `Engine.fork`."""
        return []

    @abstractmethod
    def start(self, parent: Sequence | None, num_tokens: int) -> None:
        """Queues it.

        Args:
            parent: a sequence that begins with the same tokens and may have pages, or None.
            num_tokens: how many they have in common.
        """

    @abstractmethod
    def advance(self, seqs: Several[Sequence]) -> None:
        """Takes in what a step gave to some of its sequences; to all beams at once."""

    def take_plain_token(self, seq: Sequence) -> bool:
        """Takes in one token, if nobody watches it and it ends nothing: what most steps bring.

        Returns:
            False, with nothing done, where it is not so simple: `advance` takes everything.
        """
        del seq
        return False

    @abstractmethod
    def fail(self, seq: Sequence) -> None:
        """Ends what depends on a sequence whose step computed something that is no finite number, or that
        has a `fault`.
        """

    @abstractmethod
    def check_index(self, index: object) -> None:
        """Raises InvalidRequestError unless the request has a choice of this number."""

    @abstractmethod
    def abort(self, index: int | None) -> None:
        """Ends choice number `index`, which was checked, or all of them."""

    @abstractmethod
    def rewind(self) -> list[Sequence]:
        """Goes back to what was released; for after a step that was cut short.

        Returns:
            The sequences that have to run on, with the tokens they had. The scheduler has forgotten
            all of them.
        """

    @abstractmethod
    def branch_point(self, index: int) -> tuple[Sequence, array]:
        """Where `Engine.fork` may branch off.

        Returns:
            The sequence whose pages can be shared, and the tokens of choice `index` so far. i32[any]

        Raises:
            InvalidRequestError: there is no such choice, or it cannot be forked.
        """

    @abstractmethod
    def check_invariants(self) -> None:
        """Raises AssertionError when what was released and the sequences disagree."""

    def let_go(self) -> None:
        """Gives up the pages of the held sequences."""
        for seq in self.held:
            self.scheduler.finish(seq)

    def output(self, completions: list[CompletionOutput], *, finished: bool) -> RequestOutput:
        """What is handed out of it."""
        first = self.first
        num_prompt_tokens = len(first.prompt_token_ids)
        return RequestOutput(
            first.request.id,
            completions,
            num_prompt_tokens,
            first.num_cached_tokens,
            finished,
            None if first.scores is None else first.scores.result(),
            self._times() if finished else None,
        )

    @property
    def first_scheduled_s(self) -> float | None:
        """When a step first computed some of its prompt; None while none has."""
        return self.first.first_scheduled_s

    def _times(self) -> RequestTimes:
        return RequestTimes(
            self.arrival_s, self.first_scheduled_s, self.first_token_s, self.last_token_s
        )
