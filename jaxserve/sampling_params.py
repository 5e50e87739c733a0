"""How a request is decoded: `SamplingParams` and `BeamParams`, every field checked.

Made by every face (library, CLI, server) and read everywhere behind it; the checks of single values
serve `jaxserve.request` too.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from jaxserve.errors import InvalidRequestError, shown

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_CHOICES = 128
MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 10.0
LARGEST_FLOAT = sys.float_info.max


def require(ok: bool, name: str, value: object, limit: str) -> None:
    """Raises InvalidRequestError with the field, its limit and the value, unless `ok`."""
    if not ok:
        raise InvalidRequestError(f"{name} must be {limit}, got {shown(value)}", param=name)


def is_int(value: object) -> bool:
    """A plain integer; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_within(name: str, value: object, least: int, most: int) -> None:
    """Requires an integer in [least, most]."""
    ok = is_int(value) and least <= value <= most  # type: ignore[operator]
    require(ok, name, value, f"an integer in [{least}, {most}]")


def require_real(name: str, value: object) -> None:
    """Requires a finite number."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, not converted: an integer may be beyond every float, and NaN fails each comparison.
    is_finite = is_real and -LARGEST_FLOAT <= value <= LARGEST_FLOAT  # type: ignore[operator]
    require(is_finite, name, value, "a finite number")


def plain(value: Any) -> Any:
    """Numbers of other libraries (a numpy scalar) as Python's own; everything else as it is."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


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
        n: how many outputs (choices) to draw for the prompt, which is computed once; 1 to
            MAX_CHOICES. Choice 0 draws as a request with n = 1 does, choice i from a seed derived
            from (that seed, i). At temperature 0 all of them are equal.

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
    n: int = 1

    def __post_init__(self) -> None:
        for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        if self.max_tokens is not None:
            require(
                is_int(self.max_tokens) and self.max_tokens >= 0,
                "max_tokens",
                self.max_tokens,
                "an integer >= 0",
            )
        require_real("temperature", self.temperature)
        require(self.temperature >= 0, "temperature", self.temperature, ">= 0")
        require(
            is_int(self.top_k) and -1 <= self.top_k < 2**31,
            "top_k",
            self.top_k,
            "an integer in [-1, 2**31)",
        )
        require_real("top_p", self.top_p)
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        require_real("min_p", self.min_p)
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        if self.seed is not None:
            require(
                is_int(self.seed) and -(2**63) <= self.seed < 2**64,
                "seed",
                self.seed,
                "an integer in [-2**63, 2**64)",
            )
        require_within("n", self.n, 1, MAX_CHOICES)
        self._check_stops()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "a boolean")
        known = self.logprobs is None or isinstance(self.logprobs, bool)
        require(
            known or (is_int(self.logprobs) and self.logprobs in (0, 1)),
            "logprobs",
            self.logprobs,
            "true, false, 0 or 1 (the chosen token's logprob)",
        )

    def _check_stops(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        require(
            isinstance(stops, list | tuple) and all(isinstance(s, str) for s in stops),
            "stop",
            self.stop,
            "a string or a list of strings",
        )
        require(
            len(stops) <= MAX_STOP_STRINGS,
            "stop",
            self.stop,
            f"{MAX_STOP_STRINGS} strings or fewer",
        )
        require(
            all(0 < len(s) <= MAX_STOP_LENGTH for s in stops),
            "stop",
            self.stop,
            f"strings of 1 to {MAX_STOP_LENGTH} characters",
        )
        object.__setattr__(self, "stop", tuple(stops))
        ids = self.stop_token_ids
        if not isinstance(ids, str | bytes | dict) and isinstance(ids, Iterable):
            ids = [plain(i) for i in ids]
        require(
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


@dataclass(frozen=True, kw_only=True)
class BeamParams:
    """How one request is decoded by beam search; names and meanings as in transformers.

    Args:
        beam_width: how many beams go on from step to step, and how many outputs there are; 1 to
            MAX_BEAM_WIDTH.
        max_tokens: most tokens to generate; None, and the clamping, as in `SamplingParams`.
        length_penalty: an output's score is its sum of log probabilities divided by its number of
            generated tokens (an ending token counts, the prompt does not) to this power: above 0
            favours long outputs, below 0 short ones. In [-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY].
        early_stopping: when to stop once there are beam_width finished outputs. True = at once;
            False = when the best running beam, at its present length, does not beat the worst of
            them; "never" = when it could not beat it at any length.
        ignore_eos, stop_token_ids, logprobs, skip_special_tokens: as in `SamplingParams`.

    Raises:
        InvalidRequestError: a field has the wrong type or lies outside its range; `param` names it.
    """

    beam_width: int
    max_tokens: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    logprobs: int | bool | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens", "length_penalty"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        require_within("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        require_real("length_penalty", self.length_penalty)
        require(
            abs(self.length_penalty) <= MAX_LENGTH_PENALTY,
            "length_penalty",
            self.length_penalty,
            f"in [-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}]",
        )
        require(
            isinstance(self.early_stopping, bool) or self.early_stopping == "never",
            "early_stopping",
            self.early_stopping,
            'true, false or "never"',
        )
        params = self.as_sampling_params()
        require(params.max_tokens != 0, "max_tokens", self.max_tokens, "an integer >= 1")
        object.__setattr__(self, "stop_token_ids", params.stop_token_ids)

    def as_sampling_params(self) -> SamplingParams:
        """What beam search shares with sampling, checked."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )
