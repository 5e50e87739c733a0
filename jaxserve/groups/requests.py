"""`Requests`: the requests that an engine knows: in flight, ended and held to be forked, and what they
released. Owned by the engine, which steps them.

    add -> in flight -> [ take_in | abort ] * -> ended -> gone, or held -> let_go

Invariant: whoever has ended is not in flight, and who is held has ended. `rewind` restores it after a
call that was cut short.
"""

from jaxserve.errors import InvalidRequestError
from jaxserve.groups.group import Group
from jaxserve.groups.invariants import check_requests
from jaxserve.groups.limits import Limits
from jaxserve.groups.make import Arrivals, Grammars, Watchers, make_group
from jaxserve.groups.outbox import Outbox
from jaxserve.request import Request, as_token_ids
from jaxserve.schedule.plan import StepResult
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.sequence import Sequence


class Requests:
    """Starts empty.

    Args:
        scheduler: runs their sequences.
        vocab_size, max_model_len: what a request may hold; see `Limits`.
        eos_token_ids: the model's end set.
        seed: where the draws of those come from that name no seed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        seed: int,
    ):
        self._scheduler = scheduler
        self._limits = Limits(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_slots=scheduler.kv.num_slots,
        )
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self.arrivals = Arrivals()
        self.num_prompt_tokens = 0  # of all of them
        self.in_flight: dict[str, Group] = {}
        self.held: dict[str, Group] = {}  # ended, their pages kept for `Engine.fork`
        self.outbox = Outbox()

    def find(self, request_id: str) -> Group | None:
        """The request of this id that is in flight or held."""
        return self.in_flight.get(request_id) or self.held.get(request_id)

    def has(self, request_id: str) -> bool:
        """Whether a request is in flight, or its output has not been handed out yet."""
        return request_id in self.in_flight or self.outbox.has(request_id)

    def make(self, request: Request, watcher: Watchers, grammar: Grammars) -> Group:
        """A new request, checked and counted; it is not in flight yet.

        Args:
            request, watcher, grammar: as of `Engine.add`.

        Raises:
            InvalidRequestError: it is at fault.
        """
        prompt = as_token_ids(request.prompt_token_ids)
        if self.has(request.id) or request.id in self.held:
            raise InvalidRequestError(f"id {request.id!r} is already in flight or held", param="id")
        group = make_group(
            request,
            prompt,
            self._limits.output_budget(request, prompt),
            watcher,
            grammar,
            arrival=self.arrivals.num_requests,
            engine_seed=self._seed,
            eos_token_ids=self._eos_token_ids,
            scheduler=self._scheduler,
            outbox=self.outbox,
        )
        self.arrivals.num_requests += 1
        self.num_prompt_tokens += len(prompt)
        return group

    def take_in(self, result: StepResult, now_s: float) -> None:
        """Gives a step's tokens to the requests, and lets go of those that end.

        Args:
            result: what became of its sequences.
            now_s: when it was done, by the engine's clock.
        """
        groups = self.in_flight
        advanced, failed = result
        ended: set[Group] = set()
        for seq in failed:
            group = groups[seq.request.id]
            group.fail(seq)
            if group.has_ended:
                ended.add(group)
        beams: dict[Group, list[Sequence]] = {}
        for seq in advanced:
            group = groups[seq.request.id]
            if group.last_token_s is None:
                group.first_token_s = now_s
            group.last_token_s = now_s
            if seq.wants_candidates:  # all of a group at once
                beams.setdefault(group, []).append(seq)
            elif not group.take_plain_token(seq):
                group.advance((seq,))
                if group.has_ended:
                    ended.add(group)
        for group, seqs in beams.items():
            group.advance(seqs)
            if group.has_ended:
                ended.add(group)
        for group in ended:
            self._settle(group)

    def abort(self, group: Group, index: int | None) -> None:
        """Ends choice number `index` of a request, or all of it; lets go of it where it is held."""
        if not group.has_ended:
            group.abort(index)
            if group.has_ended:
                self._settle(group)
        if index is None and group.request.id in self.held:
            group.let_go()
            del self.held[group.request.id]

    def abort_all(self) -> None:
        """Ends everything in flight; the outputs are kept to be handed out."""
        for group in list(self.in_flight.values()):
            group.abort(None)
            self._settle(group)
        self.outbox.keep()

    def _settle(self, group: Group) -> None:
        """Takes a request that has ended out of those in flight."""
        if group.held:
            self.held[group.request.id] = group
        self.in_flight.pop(group.request.id, None)

    def rewind(self) -> list[Sequence]:
        """Goes back to what was released, after a call that was cut short.

        Returns:
            The sequences that have to run on or are held, with the tokens they had.
        """
        self.outbox.keep()
        groups = self.in_flight | self.held
        seqs = [seq for group in groups.values() for seq in group.rewind()]
        self.held = {name: g for name, g in groups.items() if g.has_ended and g.held}
        self.in_flight = {name: g for name, g in groups.items() if not g.has_ended}
        return seqs

    def check_invariants(self) -> None:
        """Raises AssertionError when the queues, the pages and the requests disagree."""
        check_requests(self.in_flight, self.held, self.outbox, self._scheduler)
