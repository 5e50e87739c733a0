"""What goes into the engine and what comes out of it: `Request` and `RequestOutput`.

Every face (library, CLI, server) builds these; every field is checked here, at the border, so that
the rooms behind it may trust them. How a request is decoded stands in `jaxserve.sampling_params`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import NamedTuple

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.field_checks import is_int, plain, require
from jaxserve.field_names import checks_names
from jaxserve.sampling_params import BeamParams, SamplingParams

MAX_CACHE_SALT_LENGTH = 1024  # characters: it is kept as long as anything that was cached under it


def as_token_ids(prompt: object) -> tuple[int, ...]:
    """A prompt as plain ids, copied.

    Raises:
        InvalidRequestError: it is no sequence of integers, or it is empty.
    """
    if isinstance(prompt, str | bytes | dict) or not isinstance(prompt, Iterable):
        raise InvalidRequestError(
            f"prompt must be a list of token ids, got {shown(prompt)}", param="prompt"
        )
    ids = tuple(prompt)
    if ids and set(map(type, ids)) == {int}:  # as almost always, and quick for many
        return ids
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, Integral):
            raise InvalidRequestError(
                f"prompt token ids must be integers, got {shown(i)}", param="prompt"
            )
    if not ids:
        raise InvalidRequestError(
            "prompt must hold at least one token, got an empty one", param="prompt"
        )
    return tuple(int(i) for i in ids)


class CacheSalt(NamedTuple):
    """What separates the cached pages of one group of requests from those of another.

    Args:
        kind: where the salt comes from ("request", "api_key"), at least one character: equal values
            of different kinds are different salts.
        value: the salt, at least one character.
    """

    kind: str
    value: str


class PromptLogprob(NamedTuple):
    """How likely a token of a prompt was after those before it.

    Args:
        logprob: natural log of its probability under the model's raw logits, in f32; at least -9999.
        top: (token id, natural-log probability) of the likeliest tokens there, best first.
        rank: its place among all tokens; 1 = none was likelier.
    """

    logprob: float
    top: list[tuple[int, float]]
    rank: int


@checks_names
@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt on its way into the engine.

    Args:
        id: unique among the requests in flight.
        prompt_token_ids: i32 ids, at least one; checked against vocabulary and limits by
            `Engine.add`.
        sampling_params: how to decode it.
        priority: with admission "priority", smaller is sooner; also what eviction "priority" reads.
        cache_salt: requests share cached pages only with requests of the same salt. A text is
            tagged as the request's own; a `CacheSalt` carries the kind of its source, so that a
            salt made by a server never equals one chosen by a client.
        hold: keep its pages when it ends by itself, for `Engine.fork`, until `Engine.abort`.
        prompt_logprobs_start: with sampling_params.prompt_logprobs, the first position of the prompt
            that is scored; those before it have no entry but None, and may come from the prefix
            cache. 0 = all of the prompt.
        beam: decode it by beam search instead; `sampling_params` is then made from it and must not
            be given, nor hold.
        sender: who sent it, where several share an engine: threads that compile grammars are shared out
            between senders. Means nothing else; "" = nobody is told apart.

    Raises:
        InvalidRequestError: a field of the wrong type or out of range.
    """

    id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: "str | CacheSalt | None" = None
    hold: bool = False
    prompt_logprobs_start: int = 0
    beam: BeamParams | None = None
    sender: str = ""

    def __post_init__(self) -> None:
        require(isinstance(self.id, str), "id", self.id, "a text")
        require(isinstance(self.sender, str), "sender", self.sender, "a text")
        params = self.sampling_params
        require(isinstance(params, SamplingParams), "sampling_params", params, "SamplingParams")
        object.__setattr__(self, "priority", plain(self.priority))
        require(
            is_int(self.priority) and -(2**31) <= self.priority < 2**31,
            "priority",
            self.priority,
            "an integer in [-2**31, 2**31)",
        )
        self._check_salt(self.cache_salt)
        require(isinstance(self.hold, bool), "hold", self.hold, "a boolean")
        if self.hold and self.sampling_params.max_tokens == 0:
            raise InvalidRequestError(
                "hold needs max_tokens of at least 1: a request for no tokens computes nothing to "
                "keep",
                param="hold",
            )
        self._check_start()
        if self.beam is not None:
            self._check_beam(self.beam)

    def _check_start(self) -> None:
        name, start = "prompt_logprobs_start", plain(self.prompt_logprobs_start)
        require(is_int(start) and start >= 0, name, start, "an integer >= 0")
        if start and self.sampling_params.prompt_logprobs is None:
            raise InvalidRequestError(
                f"{name} says where prompt_logprobs begin, and none are asked for; got {shown(start)}",
                param=name,
            )
        object.__setattr__(self, name, start)

    def _check_salt(self, salt: object) -> None:
        text = "a text of at least one character"
        if isinstance(salt, CacheSalt):
            ok = all(isinstance(part, str) and len(part) > 0 for part in salt)
            require(ok, "cache_salt", salt, f"a CacheSalt whose kind and value are each {text}")
        elif salt is not None:
            text = f"a text of 1 to {MAX_CACHE_SALT_LENGTH} characters"
            fits = isinstance(salt, str) and 0 < len(salt) <= MAX_CACHE_SALT_LENGTH
            require(fits, "cache_salt", salt, text)
            object.__setattr__(self, "cache_salt", CacheSalt("request", str(salt)))

    def _check_beam(self, beam: object) -> None:
        if not isinstance(beam, BeamParams):
            raise InvalidRequestError(
                f"beam must be BeamParams or None, got {shown(beam)}", param="beam"
            )
        if self.hold:
            raise InvalidRequestError(
                "beam and hold exclude each other: a search ends with several outputs, none of "
                "which has pages of its own any more",
                param="hold",
            )
        made = beam.as_sampling_params()
        if self.sampling_params not in (SamplingParams(), made):
            raise InvalidRequestError(
                "beam and sampling_params exclude each other: beam search draws nothing; what both "
                "have (max_tokens, ignore_eos, stop_token_ids, logprobs) is a field of BeamParams",
                param="sampling_params",
            )
        object.__setattr__(self, "sampling_params", made)


# A step makes one of each per sequence. To freeze them, or to name their fields in the call, makes
# that three times as dear.
@dataclass(slots=True)
class CompletionOutput:
    """One choice's output. From `Engine.step` it is what came since the last step; from
    `LLM.generate` it is whole.

    Args:
        index: which of the request's choices, from 0; of beams, 0 is the best.
        text: released text; empty when the request runs without a tokenizer.
        token_ids: released ids, cut where the text is cut; an end-of-sequence id is kept as the
            last one.
        logprobs: natural logs in f32, one per id, or None when not asked for; at least -9999.
        finish_reason: None while running; at the end "stop", "length", "abort", or "error" when the
            model computed something that is no finite number.
        stop_reason: the stop string or stop token id that ended it, "non_finite_logits" for an
            error, None for the end set and other endings.
        score: of a beam, what `BeamParams.length_penalty` says; None otherwise.
        top_logprobs: per id the likeliest tokens there as (token id, natural-log probability), best
            first; the id itself need not be among them. None when not asked for.
        weights_versions: per id the version of the weights that it was sampled by, as
            `Engine.weights_version` counts them.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    score: float | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    # Two runs may say the same by weights that were counted otherwise.
    weights_versions: list[int] = field(default_factory=list, compare=False)


class RequestTimes(NamedTuple):
    """When what happened to a request, in seconds by its engine's clock, each at least the one before.

    A preemption, or a step that is done again, changes none of what has happened already.

    Args:
        arrival_s: it was added.
        first_scheduled_s: a step with the first tokens of its prompt was sent; None = it never ran.
        first_token_s: a step was done that had sampled for it; None = none was.
        last_token_s: the same, the last time.
    """

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced.

    Args:
        request_id: the id of the `Request`.
        outputs: one `CompletionOutput` per choice that has news, in index order; all of the choices
            when the output is whole.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: prompt tokens whose KV was there already when the prompt was first
            scheduled.
        finished: every choice has ended, and nothing of the request is to come.
        prompt_logprobs: one entry per token of the prompt, None for the first one and for those
            before `Request.prompt_logprobs_start`. The same list in every output from the first one
            on; None when not asked for, or when the request ended before all of them were known.
        times: what happened when; None until it is finished.
    """

    request_id: str
    outputs: list[CompletionOutput]
    num_prompt_tokens: int
    num_cached_tokens: int
    finished: bool
    prompt_logprobs: list[PromptLogprob | None] | None = None
    times: RequestTimes | None = field(default=None, compare=False)  # no two runs have the same


def merge_outputs(parts: Sequence[RequestOutput]) -> RequestOutput:
    """Joins what the steps released for one request, in order, into its whole `RequestOutput`."""
    by_index: dict[int, list[CompletionOutput]] = {}
    for part in parts:
        for output in part.outputs:
            by_index.setdefault(output.index, []).append(output)
    last = parts[-1]
    return RequestOutput(
        request_id=last.request_id,
        outputs=[merge_completions(by_index[index]) for index in sorted(by_index)],
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        finished=last.finished,
        prompt_logprobs=last.prompt_logprobs,
        times=last.times,
    )


def merge_completions(pieces: Sequence[CompletionOutput]) -> CompletionOutput:
    """Joins what came of one choice, in order."""
    last = pieces[-1]
    if len(pieces) == 1:  # as after almost every step
        return last
    has_logprobs, has_top = last.logprobs is not None, last.top_logprobs is not None
    return CompletionOutput(
        index=last.index,
        text="".join(p.text for p in pieces),
        token_ids=[i for p in pieces for i in p.token_ids],
        logprobs=[x for p in pieces for x in p.logprobs or ()] if has_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        score=last.score,
        top_logprobs=[x for p in pieces for x in p.top_logprobs or ()] if has_top else None,
        weights_versions=[v for p in pieces for v in p.weights_versions],
    )
