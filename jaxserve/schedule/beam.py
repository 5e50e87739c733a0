"""Beam search as arithmetic: which continuations of the beams go on, which are finished, when to
stop. Pure; called by `jaxserve.groups.beams`, which knows the sequences and pages behind the beams.

    BeamSearch -> [ candidates of every beam -> advance -> extensions ] * -> is_done, hypotheses

Of all continuations of all beams, ranked by their sum of log probabilities, those that end (an end
token, or the last position) become hypotheses if they are among the best `beam_width`; of the
others the best `beam_width` go on. Invariant: beams stand best first, hypotheses stand best first,
and there are at most `beam_width` of each.

Source: `GenerationMixin._beam_search` of transformers 5. It ranks the best (1 + number of end
tokens) * beam_width continuations only, which is the same: a beam has at most one continuation per
end token, so the `beam_width` best of the others are always among them. Two departures: a
vocabulary so small that there are fewer continuations than beams gives fewer beams (there: copies
of one), and sums are kept in float64.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxserve.sampling_params import BeamParams
from jaxserve.schedule.sequence import Candidates, TopLogprobs


class Path(NamedTuple):
    """The output tokens of a beam, as its last one and the path before it: beams that come from one
    another share what they have in common."""

    before: "Path | None"
    token_id: int
    logprob: float
    top: TopLogprobs | None = None  # the likeliest tokens there, if asked for


class Beam(NamedTuple):
    """A sequence that goes on: its path (None before the first token) and its sum of logprobs."""

    path: Path | None
    sum_logprob: float


class Extension(NamedTuple):
    """How a beam came to be: from beam number `parent` of the step before, by one token."""

    parent: int
    token_id: int
    logprob: float


class Hypothesis(NamedTuple):
    """A finished output.

    Args:
        path: its tokens, never None but where a search was given up before its first step.
        score: sum of log probabilities / number of tokens ** length_penalty.
        finish_reason: "stop" or "length", or what `give_up` was told.
    """

    path: Path | None
    score: float
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """A search between two steps; `advance` makes the next one.

    Args:
        params: width, penalty and stopping rule.
        stop_ids: tokens that end a hypothesis.
        max_tokens: most tokens to generate, clamped to what can be served; at least 1.
        beams: what goes on, best first; one without tokens at the start.
        hypotheses: the best finished ones, best first.
        num_generated: tokens of each beam.
        is_done: nothing more is to be computed.
    """

    params: BeamParams
    stop_ids: Collection[int]
    max_tokens: int
    beams: tuple[Beam, ...] = field(default=(Beam(None, 0.0),), repr=False)
    hypotheses: tuple[Hypothesis, ...] = field(default=(), repr=False)
    num_generated: int = 0
    is_done: bool = False

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens of a beam that can matter: all end tokens may be among the best ones."""
        return self.params.beam_width + len(self.stop_ids)

    def advance(
        self, candidates: Sequence[Candidates]
    ) -> tuple["BeamSearch", tuple[Extension, ...]]:
        """Takes one step.

        Args:
            candidates: of each beam, in order, at least `num_candidates` of its likeliest next
                tokens (or the whole vocabulary).

        Returns:
            The search behind the step, and where each of its beams came from.
        """
        width = self.params.beam_width
        length = self.num_generated + 1
        ranked = self._ranked(candidates)
        running: list[tuple[Beam, Extension]] = []
        hypotheses = list(self.hypotheses)
        for rank, (sum_logprob, one) in enumerate(ranked):
            is_stop = one.token_id in self.stop_ids
            if is_stop or length == self.max_tokens:
                if rank < width:
                    path = self._path(one, candidates)
                    reason = "stop" if is_stop else "length"
                    hypotheses.append(Hypothesis(path, self._score(sum_logprob, length), reason))
            elif len(running) < width:
                path = self._path(one, candidates)
                running.append((Beam(path, sum_logprob), one))
        following = replace(
            self,
            beams=tuple(beam for beam, _ in running),
            hypotheses=self._best(hypotheses),
            num_generated=length,
        )
        return replace(following, is_done=not following._goes_on()), tuple(e for _, e in running)

    def _path(self, one: Extension, candidates: Sequence[Candidates]) -> Path:
        count = self.params.num_top_logprobs
        top = candidates[one.parent].top(count) if count else None
        return Path(self.beams[one.parent].path, one.token_id, one.logprob, top)

    def give_up(self, reason: str) -> "BeamSearch":
        """The search as it ends when it is cut short: the running beams become hypotheses too.

        Args:
            reason: their finish_reason.
        """
        cut = [
            Hypothesis(beam.path, self._score(beam.sum_logprob, max(1, self.num_generated)), reason)
            for beam in self.beams
        ]
        best = self._best([*self.hypotheses, *cut])
        return replace(self, beams=(), hypotheses=best, is_done=True)

    def _ranked(self, candidates: Sequence[Candidates]) -> list[tuple[float, Extension]]:
        extensions = [
            (beam.sum_logprob + logprob, Extension(parent, token_id, logprob))
            for parent, (beam, one) in enumerate(zip(self.beams, candidates, strict=True))
            for token_id, logprob in zip(
                one.token_ids[: self.num_candidates].tolist(),
                one.logprobs[: self.num_candidates].tolist(),
                strict=True,
            )
        ]
        return sorted(extensions, key=lambda ranked: -ranked[0])

    def _best(self, hypotheses: list[Hypothesis]) -> tuple[Hypothesis, ...]:
        return tuple(sorted(hypotheses, key=lambda h: -h.score)[: self.params.beam_width])

    def _score(self, sum_logprob: float, length: int) -> float:
        return sum_logprob / length**self.params.length_penalty

    def _goes_on(self) -> bool:
        """Whether the running beams may still change the hypotheses."""
        if not self.beams:
            return False
        if len(self.hypotheses) < self.params.beam_width:
            return True
        stopping = self.params.early_stopping
        if stopping is True:
            return False
        at_the_end = stopping == "never" and self.params.length_penalty > 0
        length = self.max_tokens if at_the_end else self.num_generated
        return self._score(self.beams[0].sum_logprob, length) > self.hypotheses[-1].score


def path_tokens(path: Path | None) -> tuple[list[int], list[float]]:
    """The tokens of a path and their natural-log probabilities, first to last."""
    steps = _steps(path)
    return [one.token_id for one in steps], [one.logprob for one in steps]


def path_tops(path: Path | None) -> list[TopLogprobs]:
    """The likeliest tokens at each step of a path, first to last; they were asked for."""
    return [one.top for one in _steps(path) if one.top is not None]


def _steps(path: Path | None) -> list[Path]:
    steps = []
    while path is not None:
        steps.append(path)
        path = path.before
    return steps[::-1]
