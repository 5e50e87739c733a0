"""The fields of request bodies: one table for the parser and for /openapi.json, so that they cannot drift.

Read by `completions`, `chat` and `openapi`. A field's range stands where it is checked, in
`SamplingParams` and `Request`; the table takes its limits from there.
Invariants: null counts as absent; a field that means nothing here is ignored and said once in the log.
"""

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxserve import sampling_params as limits
from jaxserve.errors import InvalidRequestError, shown
from jaxserve.field_checks import is_int, is_real, require
from jaxserve.request import MAX_CACHE_SALT_LENGTH
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.openai.response_format import TYPES

MAX_UNKNOWN_NAMES = 200  # remembered; the names behind them are not said
MAX_NAME_LENGTH = 64  # characters of one that is remembered
Use = Literal["sampling", "own", "ignored", "refused"]

logger = logging.getLogger("jaxserve.server")


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a body.

    Args:
        name: of the field.
        schema: JSON Schema of its values other than null; {} = whatever.
        doc: what it is for.
        use: "sampling" = a field of `SamplingParams`, which checks it; "own" = read by the endpoint;
            "ignored" = taken, and without effect here; "refused" = only null is taken.
        required: must be there.
    """

    name: str
    schema: Mapping[str, Any]
    doc: str
    use: Use = "own"
    required: bool = False


def _integer(least: int | None = None, most: int | None = None) -> dict[str, Any]:
    return {"type": "integer"} | _range(least, most)


def _number(least: float | None = None, most: float | None = None) -> dict[str, Any]:
    return {"type": "number"} | _range(least, most)


def _range(least: float | None, most: float | None) -> dict[str, Any]:
    found = {} if least is None else {"minimum": least}
    return found if most is None else {**found, "maximum": most}


def _sampling(name: str, schema: Mapping[str, Any], doc: str) -> Field:
    return Field(name=name, schema=schema, doc=doc, use="sampling")


def ignored_fields(*names: str) -> tuple[Field, ...]:
    """Fields that change nothing."""
    doc = "Taken, and without effect on this server."
    return tuple(Field(name=name, schema={}, doc=doc, use="ignored") for name in names)


def refused_field(name: str, doc: str) -> Field:
    """A field of which only null is taken."""
    return Field(name=name, schema={"type": "null"}, doc=doc, use="refused")


BOOLEAN: dict[str, Any] = {"type": "boolean"}
STRING: dict[str, Any] = {"type": "string"}
#: The model's own limit, which is smaller, is held by the engine and told by /openapi.json.
TOKEN_ID = {**_integer(0, 2**31 - 1), "format": "token-id"}
_TEXT = {"type": "string", "minLength": 1}
_STOP = _TEXT | {"maxLength": limits.MAX_STOP_LENGTH}
_MOST_TOKENS = "Most tokens to generate; clamped where the context ends."
_BIAS = _number(-limits.MAX_BIAS, limits.MAX_BIAS)

SAMPLING_FIELDS = (
    _sampling("max_tokens", _integer(0), _MOST_TOKENS),
    _sampling("min_tokens", _integer(0), "No end before so many tokens."),
    _sampling("temperature", _number(0), "0 = greedy."),
    _sampling("top_p", _number(0, 1), "Keeps the smallest set of this probability."),
    _sampling("top_k", _integer(-1, 2**31 - 1), "Keeps the k likeliest tokens; 0 or -1 = all."),
    _sampling("min_p", _number(0, 1), "Drops tokens less likely than this share of the likeliest."),
    _sampling("presence_penalty", _number(-2, 2), "On tokens that were generated before."),
    _sampling("frequency_penalty", _number(-2, 2), "The same, as often as they were."),
    _sampling(
        "repetition_penalty",
        _number(limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY),
        "Divides the logits of tokens of the prompt and the output; 1 = off.",
    ),
    _sampling("seed", _integer(-(2**63), 2**64 - 1), "Makes the draws repeatable."),
    _sampling("n", _integer(1, limits.MAX_CHOICES), "Choices for each prompt."),
    _sampling(
        "stop",
        {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": limits.MAX_STOP_STRINGS}]},
        "Texts that end the output; none of them may be empty.",
    ),
    _sampling(
        "stop_token_ids",
        {"type": "array", "items": TOKEN_ID, "maxItems": limits.MAX_STOP_TOKEN_IDS},
        "Token ids that end the output.",
    ),
    _sampling("include_stop_str_in_output", BOOLEAN, "Keep the stop string in the text."),
    _sampling("ignore_eos", BOOLEAN, "Go on behind the model's end tokens."),
    _sampling(
        "logit_bias",
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": _BIAS,
            "maxProperties": limits.MAX_LOGIT_BIAS,
        },
        "Token id -> what is added to its logit.",
    ),
    _sampling(
        "bad_words",
        {
            "type": "array",
            "items": {
                "anyOf": [
                    _TEXT | {"maxLength": limits.MAX_BAD_WORD_LENGTH},
                    {"type": "array", "items": TOKEN_ID, "minItems": 1},
                ]
            },
        },
        "Texts, or lists of token ids, that are not generated.",
    ),
    _sampling(
        "allowed_token_ids",
        {"type": "array", "items": TOKEN_ID, "minItems": 1},
        "Nothing else is sampled.",
    ),
    _sampling(
        "prompt_logprobs",
        _integer(0, limits.MAX_LOGPROBS),
        "Log probabilities of the prompt's tokens, and of so many likeliest ones in their places.",
    ),
    _sampling("processed_logprobs", BOOLEAN, "Log probabilities of what is sampled from."),
    _sampling("skip_special_tokens", BOOLEAN, "Leave special tokens out of the text."),
    _sampling(
        "structured_outputs",
        {
            "type": "object",
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
            "properties": {
                "json": {"type": ["object", "string"]},
                "json_object": {"const": True},
                "regex": {"type": "string"},
                "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "grammar": {"type": "string"},
            },
        },
        "What the text must be: one of json, json_object, regex, choice, grammar.",
    ),
)
COMMON_FIELDS = (
    Field(name="model", schema=STRING, doc="A name of GET /v1/models; absent = the one served."),
    *SAMPLING_FIELDS,
    Field(name="stream", schema=BOOLEAN, doc="Send the reply as server-sent events."),
    Field(
        name="stream_options",
        schema={
            "type": "object",
            "properties": {
                "include_usage": {"type": ["boolean", "null"]},
                "continuous_usage_stats": {"type": ["boolean", "null"]},
                "include_obfuscation": {"type": ["boolean", "null"]},
            },
        },
        doc="include_usage: a last chunk with the usage; continuous_usage_stats: usage in every "
        "chunk. Only with stream.",
    ),
    Field(
        name="response_format",
        schema={"type": "object", "required": ["type"], "properties": {"type": {"enum": [*TYPES]}}},
        doc='{"type": "text" | "json_object" | "json_schema", "json_schema": {"name", "schema"}}.',
    ),
    Field(name="priority", schema=_integer(-(2**31), 2**31 - 1), doc="Smaller is sooner."),
    Field(
        name="cache_salt",
        schema=_TEXT | {"maxLength": MAX_CACHE_SALT_LENGTH},
        doc="Share cached prompts only where this is equal.",
    ),
    Field(name="return_token_ids", schema=BOOLEAN, doc="Give the ids of prompt and output too."),
    Field(
        name="return_tokens_as_token_ids",
        schema=BOOLEAN,
        doc='Name tokens "token_id:ID" in logprobs.',
    ),
    *ignored_fields(
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    ),
)


class UnknownFields:
    """Says once per name that a field means nothing here."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, name: str, known: Mapping[str, Field]) -> None:
        """Writes one line for a name that is new."""
        name = name[
            :MAX_NAME_LENGTH
        ]  # of long ones the beginning counts: it is remembered for ever
        if name in self._said or len(self._said) >= MAX_UNKNOWN_NAMES:
            return
        self._said.add(name)
        is_long = len(name) == MAX_NAME_LENGTH
        close = [] if is_long else difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        logger.warning("unknown field %s is ignored%s; said once", shown(name), hint)


def table(*fields: Field) -> dict[str, Field]:
    """Fields by name; of two with one name the later one counts."""
    return {field.name: field for field in fields}


def read_fields(
    body: Mapping[str, Any], known: Mapping[str, Field], unknown: UnknownFields
) -> dict[str, Any]:
    """The fields of a body that say something.

    Args:
        body: the JSON object.
        known: the endpoint's fields.
        unknown: is told of the others.

    Raises:
        InvalidRequestError: a field that is refused is given, or one of the endpoint's own has another
            type than the table says.
    """
    found = {}
    for name, value in body.items():
        if value is None:
            continue
        field = known.get(name)
        if field is None:
            unknown.warn(name, known)
        elif field.use == "refused":
            raise InvalidRequestError(f"{name} cannot be given: {field.doc}", param=name)
        elif field.use != "ignored":
            value = _with_integers(value, field.schema)
            if field.use == "own":
                check_type(name, value, field.schema)
            found[name] = value
    return found


def _with_integers(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value in which 5.0 is 5 where the schema wants an integer: to JSON they are one number."""
    if type(value) is float:
        return int(value) if schema.get("type") == "integer" and value.is_integer() else value
    for option in schema.get("anyOf", ()):
        value = _with_integers(value, option)
    items = schema.get("items")
    if isinstance(items, Mapping) and isinstance(value, list):
        return [_with_integers(one, items) if type(one) is not int else one for one in value]
    return value


_TYPES = {
    "string": (lambda value: isinstance(value, str), "a string"),
    "boolean": (lambda value: isinstance(value, bool), "a boolean"),
    "integer": (is_int, "an integer"),
    "number": (is_real, "a finite number"),
    "object": (lambda value: isinstance(value, Mapping), "an object"),
    "array": (lambda value: isinstance(value, list), "an array"),
}


def check_type(name: str, value: object, schema: Mapping[str, Any]) -> None:
    """Requires the JSON type that a schema names, if it names one.

    Raises:
        InvalidRequestError: it is another one; names the field.
    """
    kind = schema.get("type")
    if isinstance(kind, str):
        fits, what = _TYPES[kind]
        require(fits(value), name, value, what)


def make_sampling_params(
    fields: Mapping[str, Any], default: SamplingParams, **more: Any
) -> SamplingParams:
    """What a body says of sampling, and the default for what it leaves open.

    Args:
        fields: of `read_fields`.
        default: what the checkpoint recommends.
        more: beats the body.

    Raises:
        InvalidRequestError: as `SamplingParams`.
    """
    names = (field.name for field in SAMPLING_FIELDS)
    own = {name: fields[name] for name in names if name in fields}
    return replace(default, **{**own, **more})
