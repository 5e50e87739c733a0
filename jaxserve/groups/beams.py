"""`BeamGroup`: a request decoded by beam search, with one sequence per beam.

The beams go in lockstep. One that has its candidates while others lag (they wait for a slot, or
were preempted) is held. When all have theirs, `BeamSearch` chooses: of the beams that come from one
parent the first goes on in the parent's sequence, the others are forks that share its pages, and a
parent without children ends.

Invariant: `beams` and `search` change together; `beams[i]` has the tokens of `search.beams[i]`, and
perhaps, after a step that was cut short, one more.
"""

from array import array
from collections.abc import Sequence as Several
from typing import NamedTuple

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.groups.group import NON_FINITE, Group
from jaxserve.groups.outbox import Outbox
from jaxserve.request import CompletionOutput
from jaxserve.sampling_params import BeamParams
from jaxserve.schedule.batch import MAX_CANDIDATES
from jaxserve.schedule.beam import BeamSearch, Extension, Hypothesis, path_tokens, path_tops
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.sequence import Sequence, Status


def check_beams(params: BeamParams, stop_ids: Several[int] | frozenset[int]) -> None:
    """Raises InvalidRequestError when a step returns too few candidates for a search."""
    most = MAX_CANDIDATES - len(stop_ids)
    if params.beam_width > most:
        raise InvalidRequestError(
            f"beam_width must be at most {most} beside {len(stop_ids)} ending tokens (their sum is "
            f"limited to {MAX_CANDIDATES}), got {params.beam_width}",
            param="beam_width",
        )


class _Born(NamedTuple):
    """A beam of the next step.

    Args:
        seq: its sequence, the parent's own or a new one.
        parent: the sequence that it comes from.
        by: the token it was extended with.
    """

    seq: Sequence
    parent: Sequence
    by: Extension


class BeamGroup(Group):
    """A request in flight that is decoded by beam search.

    Args:
        first: the sequence that computes the prompt.
        params: of its request.
        scheduler: runs the sequences.
        outbox: takes the outputs, all at once at the end.
    """

    def __init__(
        self, first: Sequence, params: BeamParams, *, scheduler: Scheduler, outbox: Outbox
    ):
        super().__init__(first, scheduler)
        self.outbox = outbox
        self.search = BeamSearch(
            params=params, stop_ids=first.stop_ids, max_tokens=first.max_tokens
        )
        self.beams: tuple[Sequence, ...] = (first,)
        self._num_made = 1

    @property
    def has_ended(self) -> bool:
        return self.search.is_done

    def start(self, parent: Sequence | None, num_tokens: int) -> None:
        if parent is None:
            self.scheduler.add(self.first)
        else:
            self.scheduler.fork(parent, self.first, num_tokens)

    def advance(self, seqs: Several[Sequence]) -> None:
        if self.has_ended:  # a beam failed in this step
            return
        candidates = [seq.candidates for seq in self.beams if seq.candidates is not None]
        if len(candidates) < len(self.beams):
            for seq in seqs:
                self.scheduler.hold(seq)
            return
        search, extensions = self.search.advance(candidates)
        if search.is_done:
            self._end(search)
        else:
            self._go_on(search, self._bear(extensions))

    def _bear(self, extensions: Several[Extension]) -> list[_Born]:
        """The beams of the next step; their parents are not changed yet."""
        born = []
        has_child: set[int] = set()
        for one in extensions:
            parent = self.beams[one.parent]
            seq = parent if one.parent not in has_child else self._copy(parent, one)
            has_child.add(one.parent)
            born.append(_Born(seq, parent, one))
        return born

    def _copy(self, parent: Sequence, extension: Extension) -> Sequence:
        """A new sequence with the parent's tokens and one more."""
        child = Sequence(
            request=parent.request,
            prompt_token_ids=parent.prompt_token_ids,
            order=(parent.order[0], self._num_made),
            seed=parent.seed,
            max_tokens=parent.max_tokens,
            stop_ids=parent.stop_ids,
            page_table=self.scheduler.kv.new_table(),
            wants_candidates=True,
        )
        self._num_made += 1
        child.token_ids = parent.token_ids[:]
        child.logprobs = parent.logprobs[:]
        child.version_starts = parent.version_starts[:]
        child.append(extension.token_id, extension.logprob)
        return child

    def _go_on(self, search: BeamSearch, born: list[_Born]) -> None:
        parents = self.beams
        num_tokens = self.first.num_prompt_tokens + self.search.num_generated
        for one in born:
            if one.seq is one.parent:
                one.seq.append(one.by.token_id, one.by.logprob)
        # Two stores and no call in one statement: no interrupt can come between them.
        self.beams, self.search = tuple([one.seq for one in born]), search
        for one in born:
            if one.seq is not one.parent:
                self.scheduler.fork(one.parent, one.seq, num_tokens)
            elif one.seq.status is Status.HELD:
                self.scheduler.resume(one.seq)
        for parent in parents:
            if parent not in self.beams:
                self.scheduler.finish(parent)

    def _end(self, search: BeamSearch, stop_reason: str | None = None) -> None:
        """Makes the outputs ready and gives up every page.

        Args:
            search: as it ended.
            stop_reason: of those that were cut short.
        """
        news = [
            self._completion(rank, one, stop_reason) for rank, one in enumerate(search.hypotheses)
        ]
        # As above.
        self.outbox.ready[self], self.search = news, search
        for seq in self.beams:
            self.scheduler.finish(seq)

    def _completion(
        self, rank: int, hypothesis: Hypothesis, stop_reason: str | None
    ) -> CompletionOutput:
        token_ids, logprobs = path_tokens(hypothesis.path)
        reason: str | int | None = stop_reason
        if hypothesis.finish_reason == "stop":
            own = self.search.params.stop_token_ids
            reason = token_ids[-1] if token_ids[-1] in own else None
        elif hypothesis.finish_reason == "length":
            reason = None
        params = self.request.sampling_params
        return CompletionOutput(
            index=rank,
            text="",
            token_ids=token_ids,
            logprobs=logprobs if params.wants_logprobs else None,
            top_logprobs=path_tops(hypothesis.path) if params.num_top_logprobs else None,
            finish_reason=hypothesis.finish_reason,
            stop_reason=reason,
            score=hypothesis.score,
            # The beams go in lockstep, so tokens of one position are of one version.
            weights_versions=self.beams[0].weights_versions(0, len(token_ids)),
        )

    def fail(self, seq: Sequence) -> None:
        """Which beams would have gone on cannot be known any more: all of them end."""
        del seq
        if not self.has_ended:
            self._end(self.search.give_up("error"), NON_FINITE)

    def check_index(self, index: object) -> None:
        raise InvalidRequestError(
            f"index must be None for a beam search, got {shown(index)}: its outputs are chosen at "
            "the end",
            param="index",
        )

    def abort(self, index: int | None) -> None:
        del index  # None: no other one passes the check
        self._end(self.search.give_up("abort"))

    def rewind(self) -> list[Sequence]:
        if self.has_ended:
            return []
        for seq in self.beams:
            seq.rewind(self.search.num_generated)
            seq.status = Status.PREEMPTED
        return list(self.beams)

    def check_invariants(self) -> None:
        if self.has_ended:
            return
        assert len(set(self.beams)) == len(self.beams) == len(self.search.beams)
        for seq, beam in zip(self.beams, self.search.beams, strict=True):
            assert seq.output_token_ids == path_tokens(beam.path)[0], "not the tokens of its beam"
            is_held = seq.status is Status.HELD
            assert is_held == (seq.candidates is not None), "a beam waits for nothing"
        assert any(seq.candidates is None for seq in self.beams), "all wait for each other"

    def branch_point(self, index: int) -> tuple[Sequence, array]:
        raise InvalidRequestError(
            f"request {self.request.id!r} is a beam search: its beams cannot be forked", param="id"
        )
