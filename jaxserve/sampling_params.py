"""How a request is decoded: `SamplingParams` and `BeamParams`, every field checked.

Made by every face (library, CLI, server) and read everywhere behind it. What a field does, and in
which order, stands in docs/sampling.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.field_checks import (
    checked_list,
    checked_token_ids,
    is_int,
    is_real,
    plain,
    require,
    require_bool,
    require_real,
    require_real_within,
    require_within,
    utf8,
)
from jaxserve.field_names import checks_names
from jaxserve.structured_outputs import StructuredOutputs

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_STOP_TOKEN_IDS = 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_PENALTY = 2.0  # of presence and frequency, either sign
MIN_REPETITION_PENALTY = 0.001  # a logit divided by it is still far from the largest float32
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
MAX_LOGIT_BIAS = 1024  # entries
MAX_BAD_WORDS = 3072  # lists of ids; a text stands for up to three
MAX_BAD_WORD_TOKENS = 2048
MAX_BAD_WORD_LENGTH = 256  # characters
MAX_BAD_WORDS_IDS = 2**17  # of all of them; a text stands for three lists
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 10.0

BadWord = str | Sequence[int]

_NUMBERS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "logprobs",
    "prompt_logprobs",
)
_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "processed_logprobs",
    "echo",
)


@checks_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded; names and meanings as in vLLM and the OpenAI API.

    The order in which they act, and the rules where engines disagree, stand in docs/sampling.md. None
    stands for the default of a list.

    Args:
        max_tokens: most tokens to generate; None = up to the context length. A budget that would
            pass the context (or the whole page pool) is clamped and the request then ends with
            finish_reason "length".
        min_tokens: until so many tokens were generated, nothing of the end set and none of
            `stop_token_ids` is sampled, and stop strings are not looked for; at most max_tokens.
        temperature: 0 = greedy (top_k, top_p, min_p and seed are then ignored).
        top_k: keep the k most likely tokens; 0 or -1 = all.
        top_p: keep the smallest set whose probability reaches top_p; in [0, 1], 0 keeps the most
            likely token.
        min_p: drop tokens less likely than min_p times the most likely one; in [0, 1].
        presence_penalty: subtracted from the logit of every token that was generated before; in
            [-2, 2].
        frequency_penalty: subtracted as often as the token was generated before; in [-2, 2].
        repetition_penalty: divides the logit of every token of the prompt or the output where it is
            positive, and multiplies it where it is not; in [0.001, 10], 1 = off.
        logit_bias: added to the logits of these tokens: a mapping of token id (or its digits as a
            text, as JSON has them) to a number in [-100, 100], at most MAX_LOGIT_BIAS entries. Kept
            as a tuple of pairs, sorted by id; None = none.
        bad_words: texts, or lists of token ids, that are not generated: their last token is not
            sampled where the ones before it were. Texts need a tokenizer.
        allowed_token_ids: nothing else is sampled; None = everything may be.
        seed: makes the draws a function of (seed, output position) alone; 64 bits, negative values
            wrap (-1 is 2**64 - 1). None = derived from the engine's seed and the request's index.
        stop: strings that end the text; never part of it unless include_stop_str_in_output.
        stop_token_ids: ids that end the request besides the end set; never switched off by
            ignore_eos.
        include_stop_str_in_output: keep the stop string that ended the text.
        ignore_eos: do not stop at the model's end set.
        logprobs: None or False = none; True or 0 = the chosen token's natural-log probability per
            output token; 1 to MAX_LOGPROBS = also those of the so many likeliest tokens.
        prompt_logprobs: the same for the tokens of the prompt: None, or 0 to MAX_LOGPROBS.
        processed_logprobs: give the log probabilities of what is sampled from, instead of those of the
            model's own logits.
        skip_special_tokens: leave special tokens out of the text.
        echo: the output begins with the prompt, its text and its token ids.
        structured_outputs: what the text must be, as `StructuredOutputs` or a mapping of its fields: a
            JSON schema, a regular expression and others. Not with ignore_eos.
        n: how many outputs (choices) to draw for the prompt, which is computed once; 1 to
            MAX_CHOICES. Choice 0 draws as a request with n = 1 does, choice i from a seed derived
            from (that seed, i). At temperature 0 all of them are equal.

    Raises:
        InvalidRequestError: a field has the wrong type or lies outside its range; `param` names it.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]] | None = (
        None
    )
    bad_words: Sequence[BadWord] = ()
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | bool | None = None
    prompt_logprobs: int | None = None
    processed_logprobs: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            object.__setattr__(self, name, plain(getattr(self, name)))
        for name in _FLAGS:
            require_bool(name, getattr(self, name))
        require_within("n", self.n, 1, MAX_CHOICES)
        self._check_lengths()
        self._check_draws()
        self._check_penalties()
        self._check_logprobs()
        self._check_stops()
        self._check_token_sets()
        self._check_structure()

    def _check_lengths(self) -> None:
        cap = self.max_tokens
        if cap is not None:
            require(is_int(cap) and cap >= 0, "max_tokens", cap, "an integer >= 0")
        least = self.min_tokens
        require(is_int(least) and least >= 0, "min_tokens", least, "an integer >= 0")
        if cap is not None:
            limit = f"at most max_tokens ({shown(cap)})"
            require(least <= cap, "min_tokens", least, limit)

    def _check_draws(self) -> None:
        require_real("temperature", self.temperature)
        require(self.temperature >= 0, "temperature", self.temperature, ">= 0")
        if self.temperature > 2**53:  # not every integer is a number that can be computed with
            object.__setattr__(self, "temperature", float(self.temperature))
        in_range = is_int(self.top_k) and -1 <= self.top_k < 2**31
        require(in_range, "top_k", self.top_k, "an integer in [-1, 2**31)")
        require_real_within("top_p", self.top_p, 0, 1)
        require_real_within("min_p", self.min_p, 0, 1)
        seed = self.seed
        if seed is not None:
            in_range = is_int(seed) and -(2**63) <= seed < 2**64
            require(in_range, "seed", seed, "an integer in [-2**63, 2**64)")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            require_real_within(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        value = self.repetition_penalty
        require_real("repetition_penalty", value)
        least, most = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        require(least <= value <= most, "repetition_penalty", value, f"in [{least:g}, {most:g}]")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def _check_logprobs(self) -> None:
        if self.logprobs is not None and not isinstance(self.logprobs, bool):
            in_range = is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS
            limit = f"true, false or an integer in [0, {MAX_LOGPROBS}]"
            require(in_range, "logprobs", self.logprobs, limit)
        if self.prompt_logprobs is not None:
            require_within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)

    def _check_stops(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        stops = () if stops is None else stops
        is_list = isinstance(stops, list | tuple) and all(isinstance(s, str) for s in stops)
        require(is_list, "stop", self.stop, "a string or a list of strings")
        limit = f"{MAX_STOP_STRINGS} strings or fewer"
        require(len(stops) <= MAX_STOP_STRINGS, "stop", self.stop, limit)
        fit = all(0 < len(s) <= MAX_STOP_LENGTH for s in stops)
        require(fit, "stop", self.stop, f"strings of 1 to {MAX_STOP_LENGTH} characters")
        for text in stops:
            utf8("stop", text)
        object.__setattr__(self, "stop", tuple(stops))
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        ids = checked_token_ids("stop_token_ids", ids, most=MAX_STOP_TOKEN_IDS)
        object.__setattr__(self, "stop_token_ids", ids)

    def _check_token_sets(self) -> None:
        words = () if self.bad_words is None else self.bad_words
        words = checked_list(
            "bad_words", words, what="a list of texts or lists of token ids", most=MAX_BAD_WORDS
        )
        num_lists = sum(3 if isinstance(word, str) else 1 for word in words)
        limit = f"{MAX_BAD_WORDS} lists of token ids or fewer, where a text counts as three"
        require(num_lists <= MAX_BAD_WORDS, "bad_words", words, limit)
        words = tuple(_checked_bad_word(word) for word in words)
        size = sum(map(_num_ids_of, words))
        limit = (
            f"lists of {MAX_BAD_WORDS_IDS} token ids or fewer in all, where a text counts as three lists "
            "of an id for each byte, and one more"
        )
        if size > MAX_BAD_WORDS_IDS:
            raise InvalidRequestError(f"bad_words must be {limit}, got {size}", param="bad_words")
        object.__setattr__(self, "bad_words", words)
        if self.allowed_token_ids is not None:
            name = "allowed_token_ids"
            ids = checked_token_ids(name, self.allowed_token_ids, most=MAX_ALLOWED_TOKEN_IDS)
            require(len(ids) > 0, name, list(ids), "a list of at least one token id, or null")
            object.__setattr__(self, name, tuple(sorted(set(ids))))

    def _check_structure(self) -> None:
        if self.structured_outputs is None:
            return
        wanted = StructuredOutputs.from_value(self.structured_outputs)
        object.__setattr__(self, "structured_outputs", wanted)
        limit = "false where structured_outputs are given: they end with the end set"
        require(not self.ignore_eos, "ignore_eos", self.ignore_eos, limit)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the chosen token's logprob is returned (0 asks for it too)."""
        return self.logprobs is not None and self.logprobs is not False

    @property
    def num_top_logprobs(self) -> int:
        """How many of the likeliest tokens are returned per output token; 0 = none."""
        return _num_top(self.logprobs)

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept: (token id, bias), sorted by id."""
        return self.logit_bias or ()  # type: ignore[return-value]

    @property
    def wants_penalties(self) -> bool:
        """Whether what was generated, or asked, changes the logits of what comes."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


def _num_top(logprobs: int | bool | None) -> int:
    return 0 if logprobs is None or isinstance(logprobs, bool) else logprobs


def _checked_bias(value: object) -> tuple[tuple[int, float], ...] | None:
    """logit_bias as pairs sorted by id; None when there are none."""
    what = "a mapping of token ids to numbers"
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = value.items()
    pairs: dict[int, float] = {}
    for pair in checked_list("logit_bias", value, what=what, most=MAX_LOGIT_BIAS):
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        require(is_pair, "logit_bias", pair, what)
        token_id, bias = _bias_id(pair[0]), plain(pair[1])
        in_range = is_real(bias) and -MAX_BIAS <= bias <= MAX_BIAS
        limit = f"numbers in [-{MAX_BIAS:g}, {MAX_BIAS:g}]; token {token_id}"
        require(in_range, "logit_bias", bias, limit)
        require(token_id not in pairs, "logit_bias", pair[0], "one number per token id")
        pairs[token_id] = float(bias)
    return tuple(sorted(pairs.items())) or None


def _bias_id(key: object) -> int:
    """A token id, or its digits as a text: JSON has no other keys."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
        key = int(key)
    what = "a mapping of token ids to numbers: the ids"
    return checked_token_ids("logit_bias", [key], most=1, what=what)[0]


def _checked_bad_word(word: object) -> str | tuple[int, ...]:
    if isinstance(word, str):
        fits = 0 < len(word) <= MAX_BAD_WORD_LENGTH
        require(fits, "bad_words", word, f"texts of 1 to {MAX_BAD_WORD_LENGTH} characters")
        return word
    what = "a list of texts or lists of token ids"
    ids = checked_token_ids("bad_words", word, most=MAX_BAD_WORD_TOKENS, what=what)
    require(len(ids) > 0, "bad_words", word, f"{what}, none of them empty")
    return ids


def _num_ids_of(word: str | tuple[int, ...]) -> int:
    """As many ids as a bad word may stand for, as a rule: a token of a text has at least a byte."""
    return 3 * (len(word.encode("utf-8", "replace")) + 1) if isinstance(word, str) else len(word)


@checks_names
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
        for name in ("beam_width", "max_tokens", "length_penalty", "logprobs"):
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

    @property
    def num_top_logprobs(self) -> int:
        """How many of the likeliest tokens are returned per output token; 0 = none."""
        return _num_top(self.logprobs)

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
