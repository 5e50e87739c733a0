"""What goes into the engine and what comes out of it: `SamplingParams`, `Request`, `RequestOutput`.

Every face (library, CLI, server) builds these; every field is checked here, at the border, so that
the rooms behind it may trust them.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import NamedTuple

from jaxserve.errors import InvalidRequestError, shown

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters
LARGEST_FLOAT = sys.float_info.max


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name} must be {limit}, got {shown(value)}", param=name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_real(name: str, value: object) -> None:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, not converted: an integer may be beyond every float, and NaN fails each comparison.
    is_finite = is_real and -LARGEST_FLOAT <= value <= LARGEST_FLOAT  # type: ignore[operator]
    _require(is_finite, name, value, "a finite number")


def _plain(value: object) -> object:
    """Numbers of other libraries (a numpy scalar) as Python's own; everything else as it is."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


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


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded; names and meanings as in vLLM and the OpenAI API.

    Args:
        max_tokens: most tokens to generate; None = up to the context length. A budget that would
            pass the context (or the whole page pool) is clamped and the request then ends with
            finish_reason "length".
        temperature: 0 = greedy (top_k, top_p, min_p and seed are then ignored).
        top_k: keep the k most likely tokens; 0 or -1 = all.
        top_p: keep the smallest set whose probability reaches top_p; in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one; in [0, 1].
        seed: makes the draws a function of (seed, output position) alone; 64 bits, negative values
            wrap (-1 is 2**64 - 1). None = derived from the engine's seed and the request's index.
        stop: strings that end the text; never part of it unless include_stop_str_in_output.
        stop_token_ids: ids that end the request besides the end set; never switched off by
            ignore_eos.
        ignore_eos: do not stop at the model's end set.
        logprobs: None or False = none; True, 0 or 1 = the chosen token's natural-log probability
            per output token.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidRequestError: a field has the wrong type or lies outside its range; `param` names it.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | bool | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        if self.max_tokens is not None:
            _require(
                _is_int(self.max_tokens) and self.max_tokens >= 0,
                "max_tokens",
                self.max_tokens,
                "an integer >= 0",
            )
        _require_real("temperature", self.temperature)
        _require(self.temperature >= 0, "temperature", self.temperature, ">= 0")
        _require(
            _is_int(self.top_k) and -1 <= self.top_k < 2**31,
            "top_k",
            self.top_k,
            "an integer in [-1, 2**31)",
        )
        _require_real("top_p", self.top_p)
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require_real("min_p", self.min_p)
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        if self.seed is not None:
            _require(
                _is_int(self.seed) and -(2**63) <= self.seed < 2**64,
                "seed",
                self.seed,
                "an integer in [-2**63, 2**64)",
            )
        self._check_stops()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "a boolean")
        known = self.logprobs is None or isinstance(self.logprobs, bool)
        _require(
            known or (_is_int(self.logprobs) and self.logprobs in (0, 1)),
            "logprobs",
            self.logprobs,
            "true, false, 0 or 1 (the chosen token's logprob)",
        )

    def _check_stops(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        _require(
            isinstance(stops, list | tuple) and all(isinstance(s, str) for s in stops),
            "stop",
            self.stop,
            "a string or a list of strings",
        )
        _require(
            len(stops) <= MAX_STOP_STRINGS,
            "stop",
            self.stop,
            f"{MAX_STOP_STRINGS} strings or fewer",
        )
        _require(
            all(0 < len(s) <= MAX_STOP_LENGTH for s in stops),
            "stop",
            self.stop,
            f"strings of 1 to {MAX_STOP_LENGTH} characters",
        )
        object.__setattr__(self, "stop", tuple(stops))
        ids = self.stop_token_ids
        if not isinstance(ids, str | bytes | dict) and isinstance(ids, Iterable):
            ids = [_plain(i) for i in ids]
        _require(
            isinstance(ids, list | tuple)
            and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids),
            "stop_token_ids",
            ids,
            "a list of token ids",
        )
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @property
    def wants_logprobs(self) -> bool:
        """Whether the chosen token's logprob is returned (0 asks for it too)."""
        return self.logprobs is not None and self.logprobs is not False


class CacheSalt(NamedTuple):
    """What separates the cached pages of one group of requests from those of another.

    Args:
        kind: where the salt comes from ("request", "api_key"): equal values of different kinds are
            different salts.
        value: the salt, at least one character.
    """

    kind: str
    value: str


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
        hold: keep its pages when it ends, for `Engine.fork`, until it is aborted.

    Raises:
        InvalidRequestError: a field of the wrong type or out of range.
    """

    id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: "str | CacheSalt | None" = None
    hold: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "priority", _plain(self.priority))
        _require(
            _is_int(self.priority) and -(2**31) <= self.priority < 2**31,
            "priority",
            self.priority,
            "an integer in [-2**31, 2**31)",
        )
        salt = self.cache_salt
        if isinstance(salt, str):
            salt = CacheSalt("request", salt)
            object.__setattr__(self, "cache_salt", salt)
        _require(
            salt is None
            or (
                isinstance(salt, CacheSalt) and isinstance(salt.value, str) and 0 < len(salt.value)
            ),
            "cache_salt",
            self.cache_salt,
            "a text of at least one character, a CacheSalt, or None",
        )
        _require(isinstance(self.hold, bool), "hold", self.hold, "a boolean")


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sequence's output. From `Engine.step` it is what came since the last step; from
    `LLM.generate` it is whole.

    Args:
        index: which of the request's sequences (0 today).
        text: released text; empty when the request runs without a tokenizer.
        token_ids: released ids, cut where the text is cut; an end-of-sequence id is kept as the
            last one.
        logprobs: f32 natural logs, one per id, or None when not asked for.
        finish_reason: None while running; "stop", "length" or "abort" at the end.
        stop_reason: the stop string or stop token id that ended it, None for the end set and other
            endings.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What a request has produced; `finished` when every one of its sequences has a finish_reason.

    Args:
        request_id: the id of the `Request`.
        outputs: one `CompletionOutput` per sequence.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: prompt tokens whose KV came from a prefix hit.
    """

    request_id: str
    outputs: list[CompletionOutput]
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


def merge_outputs(parts: Sequence[RequestOutput]) -> RequestOutput:
    """Joins what the steps released for one request, in order, into its whole `RequestOutput`."""
    last = parts[-1]
    merged = []
    for index in range(len(last.outputs)):
        pieces = [part.outputs[index] for part in parts]
        has_logprobs = pieces[0].logprobs is not None
        merged.append(
            CompletionOutput(
                index=index,
                text="".join(p.text for p in pieces),
                token_ids=[i for p in pieces for i in p.token_ids],
                logprobs=[x for p in pieces for x in p.logprobs or ()] if has_logprobs else None,
                finish_reason=pieces[-1].finish_reason,
                stop_reason=pieces[-1].stop_reason,
            )
        )
    return RequestOutput(
        request_id=last.request_id,
        outputs=merged,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
    )
