"""`response_format`, OpenAI's way to say what a text must be, as `StructuredOutputs`. Of both endpoints."""

import re
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.field_checks import require
from jaxserve.structured_outputs import StructuredOutputs

TYPES = ("text", "json_object", "json_schema")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def structured_outputs_of(fields: Mapping[str, Any]) -> StructuredOutputs | None:
    """What a body's `structured_outputs` or `response_format` asks for; None = any text.

    Args:
        fields: of a body, null ones left out.

    Raises:
        InvalidRequestError: it is malformed, or both are given.
    """
    own = fields.get("structured_outputs")
    wanted = _of_format(fields["response_format"]) if "response_format" in fields else None
    if own is None:
        return wanted
    if wanted is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs exclude each other", param="response_format"
        )
    return StructuredOutputs.from_value({k: v for k, v in _mapping(own).items() if v is not None})


def _mapping(value: object) -> Mapping[str, Any]:
    require(isinstance(value, Mapping), "structured_outputs", value, "an object")
    return value  # type: ignore[return-value]


def _of_format(value: Mapping[str, Any]) -> StructuredOutputs | None:
    name = "response_format"
    kind = value.get("type")
    require(kind in TYPES, f"{name}.type", kind, f"one of {', '.join(TYPES)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    described = value.get("json_schema")
    name = f"{name}.json_schema"
    require(isinstance(described, Mapping), name, described, "an object with name and schema")
    title = described.get("name")  # type: ignore[union-attr]
    is_name = isinstance(title, str) and _NAME.fullmatch(title) is not None
    require(is_name, f"{name}.name", title, "1 to 64 letters, digits, _ or -")
    for key, fits, what in (
        ("strict", bool, "a boolean"),  # it is kept to either way
        ("description", str, "a string"),
    ):
        given = described.get(key)  # type: ignore[union-attr]
        require(given is None or isinstance(given, fits), f"{name}.{key}", given, what)
    schema = described.get("schema")  # type: ignore[union-attr]
    if schema is None:  # as OpenAI says: any JSON object
        return StructuredOutputs(json_object=True)
    require(isinstance(schema, Mapping), f"{name}.schema", schema, "an object (a JSON schema)")
    return StructuredOutputs(json=schema)
