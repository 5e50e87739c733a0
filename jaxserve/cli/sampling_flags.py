"""The flags of how requests are decoded, where each value comes from, and --explain_sampling.

    a line's own field > a flag > generation_config.json of the checkpoint > the default of the field

Used by `run`. What a field means stands in docs/sampling.md.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

from jaxserve.cli.flag_types import (
    JsonParser,
    ListParser,
    LogprobsParser,
    define_float,
    define_integer,
)
from jaxserve.errors import CheckpointError
from jaxserve.generation_config import FILE, MODES, sampling_defaults
from jaxserve.request import Request, SamplingParams

SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
REQUEST_FIELDS = ("priority", "cache_salt", "tools")  # of a line, beside the sampling fields

_GROUP = "sampling (for what a line does not set itself)"
_INTEGERS = {
    "max_tokens": "Most tokens to generate; unset = up to the context.",
    "min_tokens": "Do not end before so many tokens.",
    "top_k": "Keep the k most likely tokens; 0 or -1 = all.",
    "prompt_logprobs": "Log probabilities of the prompt's tokens, and so many likeliest ones.",
    "n": "Outputs to draw for each prompt.",
    "priority": "With --admission=priority, smaller is sooner.",
}
_FLOATS = {
    "temperature": "0 = greedy.",
    "top_p": "Keep the likeliest tokens up to this mass.",
    "min_p": "Drop tokens less likely than this times the best.",
    "presence_penalty": "Subtracted from tokens that were generated before.",
    "frequency_penalty": "Subtracted as often as they were.",
    "repetition_penalty": "Divides what the prompt or the output holds; 1 = off.",
}
_BOOLEANS = {
    "include_stop_str_in_output": "Leave the stop string in the text.",
    "ignore_eos": "Go on past the model's end tokens.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "processed_logprobs": "Log probabilities of what is sampled from, not of the model's logits.",
    "echo": "Begin the text and ids with the prompt's.",
}
_LISTS = {
    "stop_token_ids": "Token ids that end the text as well",
    "allowed_token_ids": "Token ids; nothing else is generated",
    "bad_words": "Texts, or lists of token ids in JSON, that are not generated",
}
_JSON = {
    "logit_bias": ("Token ids and what is added to their logits.", dict),
    "structured_outputs": ('What the text must be, as {"regex": "..."}.', dict),
    "tools": ("Functions that the chat template tells the model of.", list),
}


def define_sampling(flag_values: flags.FlagValues) -> None:
    """A flag for every field but `seed`, which is an engine flag; --generation_config and
    --explain_sampling.
    """
    defaults = _field_defaults()
    group: dict[str, Any] = {"flag_values": flag_values, "module_name": _GROUP}
    for name, text in _INTEGERS.items():
        define_integer(name, defaults[name], text, **group)
    for name, text in _FLOATS.items():
        define_float(name, defaults[name], text, **group)
    for name, text in _BOOLEANS.items():
        flags.DEFINE_boolean(name, defaults[name], text, **group)
    for name, text in _LISTS.items():
        parser = ListParser(of_integers=name != "bad_words")
        flags.DEFINE_multi(parser, flags.ArgumentSerializer(), name, None, text, **group)
    for name, (text, kind) in _JSON.items():
        flags.DEFINE(JsonParser(kind), name, None, text, **group)
    flags.DEFINE_multi_string("stop", None, "A string that ends the text", **group)
    flags.DEFINE_string("cache_salt", None, "Share cached pages only under this salt.", **group)
    logprobs = "Each chosen token's log probability; a number: also of so many likeliest ones."
    flags.DEFINE(LogprobsParser(), "logprobs", None, logprobs, **group)
    flag_values["logprobs"].boolean = True  # so that it needs no value
    flags.DEFINE_enum(
        "generation_config",
        "auto",
        MODES,
        f"auto: temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens of the "
        f"checkpoint's {FILE} are the defaults; none: they are not.",
        **group,
    )
    flags.DEFINE_boolean(
        "explain_sampling",
        False,
        "Print every field, its value and where it came from; without prompts and --input, nothing else.",
        **group,
    )


def given_sampling(flag_values: flags.FlagValues) -> dict[str, Any]:
    """The fields that the command line sets, of `SAMPLING_FIELDS` and `REQUEST_FIELDS`.

    Raises:
        InvalidRequestError: a value outside its range.
    """
    names = [name for name in (*SAMPLING_FIELDS, *REQUEST_FIELDS) if name != "seed"]
    given = {name: flag_values[name] for name in names}
    fields: dict[str, Any] = {name: flag.value for name, flag in given.items() if flag.present}
    for name in _LISTS.keys() & fields.keys():
        fields[name] = [item for items in fields[name] for item in items]
    check_fields(fields)
    return fields


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError where a request with these fields would."""
    own = {name: value for name, value in fields.items() if name in SAMPLING_FIELDS}
    others = {name: fields[name] for name in ("priority", "cache_salt") if name in fields}
    Request(id="", prompt_token_ids=(0,), sampling_params=SamplingParams(**own), **others)
    if fields.get("tools"):
        from jaxserve.text.chat_template import check_tools  # not for every --help

        check_tools(fields["tools"])


@dataclass(frozen=True, kw_only=True)
class SamplingSources:
    """What the lines of a run start from.

    Args:
        given: fields that the command line sets.
        recommended: fields that the checkpoint sets.
    """

    given: Mapping[str, Any]
    recommended: Mapping[str, Any]

    @classmethod
    def of_model(cls, given: Mapping[str, Any], model: str, mode: str) -> "SamplingSources":
        """Reads what the checkpoint recommends.

        Raises:
            CheckpointError: there is no such model, or its file holds a value that no request could
                have.
            InvalidRequestError: a flag and the checkpoint's values exclude each other.
        """
        # Imported here: --help and mistakes do without it.
        from jaxserve.weights.hf_directory import read_generation_config
        from jaxserve.weights.loader import resolve_model

        path = Path(resolve_model(model))
        try:
            recommended = sampling_defaults(read_generation_config(path), mode)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        sources = cls(given=given, recommended=recommended)
        check_fields(sources.fields)
        return sources

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that have another value than their own default, or were given it."""
        return {**self.recommended, **self.given}

    @property
    def sampling(self) -> dict[str, Any]:
        """Those of `SamplingParams`."""
        return {name: value for name, value in self.fields.items() if name in SAMPLING_FIELDS}

    @property
    def request(self) -> dict[str, Any]:
        """Those of the request beside it."""
        return {name: value for name, value in self.fields.items() if name in REQUEST_FIELDS}

    def values(self) -> dict[str, Any]:
        """Every field but the seed, with its value, in JSON types."""
        return _field_defaults() | self.fields

    def explain(self, seed: int) -> str:
        """A table of every field, its value as JSON, and where it came from.

        Args:
            seed: --seed.
        """
        rows = [("field", "value", "from")]
        for name, value in self.values().items():
            source = f"--{name}" if name in self.given else "default"
            if source == "default" and name in self.recommended:
                source = FILE
            rows.append((name, json.dumps(value, ensure_ascii=False), source))
        rows.append(("seed", "null", f"each line's own: from --seed ({seed}) and its index"))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{a:<{widths[0]}}  {b:<{min(widths[1], 40)}}  {c}" for a, b, c in rows]
        return "\n".join([*lines, "what a line sets itself beats all of these", ""])


def _field_defaults() -> dict[str, Any]:
    """Every field but the seed, with its own default, in JSON types."""
    params = SamplingParams()
    values = {name: getattr(params, name) for name in SAMPLING_FIELDS if name != "seed"}
    values |= {"priority": 0, "cache_salt": None, "tools": None}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
