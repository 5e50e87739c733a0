"""What the text of an output must be: `StructuredOutputs`, checked at the border.

A field of `SamplingParams`. It holds texts alone; `jaxserve.constraints` makes a grammar of them, with
a tokenizer, before the request is queued.
"""

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.field_checks import checked_list, require, utf8
from jaxserve.field_names import checks_names

NAME = "structured_outputs"
TOO_COSTLY = "structured_outputs_too_costly"  # the stop_reason where going on costs too much
MAX_SCHEMA_BYTES = 256 * 1024  # of a JSON schema, as compact UTF-8
MAX_SCHEMA_DEPTH = 96  # objects and lists inside each other
MAX_REGEX_BYTES = 16 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_TEXT_CHOICES = 10_000
MAX_CHOICE_BYTES = 16 * 1024
MAX_CHOICES_BYTES = 256 * 1024  # all of them together


@checks_names
@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the text must be; exactly one field is given.

    Args:
        json: a JSON schema, as an object or as its text; the output is one JSON value that it accepts.
        json_object: True = the output is any JSON object. False = not given.
        regex: a regular expression in the syntax of Rust's regex crate; the whole output matches it.
        choice: texts; the output is one of them.
        grammar: a grammar in llguidance's dialect of Lark; the output is a text of its language.

    After construction `json` is compact text and `choice` a tuple.

    Raises:
        InvalidRequestError: none or several are given, or one has the wrong type or is too large;
            `param` is structured_outputs.FIELD.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is not None:
            ok = isinstance(self.json_object, bool)
            require(ok, f"{NAME}.json_object", self.json_object, "true or false")
            object.__setattr__(self, "json_object", self.json_object or None)
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"{NAME} must have exactly one of {', '.join(_FIELDS)}, got "
                f"{' and '.join(given) or 'none of them'}",
                param=NAME,
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choices(self.choice))
        if self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_BYTES)
        if self.grammar is not None:
            _check_text("grammar", self.grammar, MAX_GRAMMAR_BYTES)

    @classmethod
    def from_value(cls, value: object) -> "StructuredOutputs":
        """From what a user gave: one of these, or a mapping of its fields as JSON has them.

        Raises:
            InvalidRequestError: it is neither, or has a field of another name.
        """
        if isinstance(value, cls):
            return value
        require(
            isinstance(value, Mapping), NAME, value, f"an object with one of {', '.join(_FIELDS)}"
        )
        unknown = [key for key in value if key not in _FIELDS]  # type: ignore[union-attr]
        if unknown:
            raise InvalidRequestError(
                f"{NAME} has no field {shown(unknown[0])}; it has {', '.join(_FIELDS)}", param=NAME
            )
        return cls(**value)  # type: ignore[arg-type]

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _FIELDS if getattr(self, name) is not None)


_FIELDS = tuple(field.name for field in fields(StructuredOutputs))


def _check_text(field: str, value: object, max_bytes: int) -> None:
    """Requires a text that is valid Unicode, not empty and not too long."""
    name = f"{NAME}.{field}"
    require(isinstance(value, str) and value != "", name, value, "a text that is not empty")
    size = len(utf8(name, value))  # type: ignore[arg-type]
    if size > max_bytes:
        raise InvalidRequestError(
            f"{name} must have {max_bytes} bytes or fewer, got {size}", param=name
        )


def _checked_choices(value: object) -> tuple[str, ...]:
    name = f"{NAME}.choice"
    texts = checked_list(name, value, what="a list of texts", most=MAX_TEXT_CHOICES)
    require(len(texts) > 0, name, texts, "a list of at least one text")
    total = 0
    for text in texts:
        _check_text("choice", text, MAX_CHOICE_BYTES)
        total += len(text.encode())
    if total > MAX_CHOICES_BYTES:
        raise InvalidRequestError(
            f"{name} must have {MAX_CHOICES_BYTES} bytes or fewer in all, got {total}", param=name
        )
    return tuple(dict.fromkeys(texts))


def _schema_text(value: object) -> str:
    """A schema as compact JSON text, its keys in the order they came in: properties keep that order."""
    name = f"{NAME}.json"
    if isinstance(value, str):
        _check_text("json", value, MAX_SCHEMA_BYTES)
        try:
            value = json_text.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{name} is not JSON: {error}", param=name) from error
    require(isinstance(value, Mapping), name, value, "a JSON object (a schema)")
    _check_depth(name, value)
    try:
        text = json_text.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name} is not JSON: {error}", param=name) from error
    _check_text("json", text, MAX_SCHEMA_BYTES)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _check_depth(name: str, value: object) -> None:
    """Refuses values too deep, and keys that are no texts, which JSON would silently make texts."""
    level: list[object] = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[object] = []
        for one in level:
            if isinstance(one, Mapping):
                for key in one:
                    require(isinstance(key, str), name, key, "an object with texts as keys")
                below += one.values()
            elif isinstance(one, list | tuple):
                below += one
        level = [one for one in below if isinstance(one, Mapping | list | tuple)]
        if not level:
            return
    raise InvalidRequestError(
        f"{name} must have {MAX_SCHEMA_DEPTH} or fewer objects and lists inside each other, got more",
        param=name,
    )
