"""Which JSON schemas are served: `checked_schema`, called before a grammar is made of one.

llguidance refuses much of what it does not serve, but not everything: unknown keywords, keywords that
the schema's draft does not have, and numbers that it rounds would make the grammar wider than the
schema. Here every keyword of every schema that can be reached is known, or the request is refused.

Invariant: what passes is either enforced by the grammar or says nothing about a value.
"""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from jaxserve.errors import InvalidRequestError, shown

FIELD = "structured_outputs.json"
MAX_COUNT = 2**31 - 1  # of characters, items, properties
MAX_EXACT = 2**53  # up to here every integer is a double of its own
MAX_REF_DEPTH = 128  # schemas inside each other, through $ref too

_DRAFT_4 = "http://json-schema.org/draft-04/schema"
_DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
DRAFTS = (
    _DRAFT_2020,
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
    _DRAFT_4,
)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
# These say nothing about a value.
ANNOTATIONS = (
    "$schema",
    "$comment",
    "$anchor",
    "title",
    "description",
    "default",
    "example",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "discriminator",
)


def checked_schema(text: str) -> str:
    """A schema without the keywords that demand nothing, once all others are known to be enforced.

    Args:
        text: a JSON object, as `StructuredOutputs` holds it.

    Raises:
        InvalidRequestError: a keyword is unsupported or has a value of the wrong kind; the message
            names it and where it stands.
    """
    root = json.loads(text)
    _Walk(root).schema(root, "#", 0)
    return json.dumps(root, ensure_ascii=False, separators=(",", ":"))


def _refuse(where: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{FIELD} at {shown(where)}: {message}", param=FIELD)


class _Walk:
    """Looks at every schema that can be reached from the root, each once."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._draft = str(root.get("$schema", _DRAFT_2020)).removesuffix("#")
        self._seen: set[int] = set()
        if self._draft not in DRAFTS:
            raise _refuse("#", f"$schema must be one of {DRAFTS}, got {shown(root['$schema'])}")

    def schema(self, node: object, where: str, depth: int) -> None:
        if isinstance(node, bool) or id(node) in self._seen:
            return
        if not isinstance(node, dict):
            raise _refuse(where, f"a schema must be an object or a boolean, got {shown(node)}")
        if depth > MAX_REF_DEPTH:
            raise _refuse(
                where, f"more than {MAX_REF_DEPTH} schemas inside each other, by $ref too"
            )
        self._seen.add(id(node))
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        if "$schema" in node and node is not self._root:
            raise _refuse(where, "$schema is supported at the root only")
        for keyword, value in node.items():
            self._keyword(keyword, value, f"{where}/{keyword}", depth)
        self._minimum_of_properties(node, where)

    def _keyword(self, keyword: str, value: object, where: str, depth: int) -> None:
        if keyword == "prefixItems" and self._draft != _DRAFT_2020:
            raise _refuse(where, f"keyword {keyword} does not exist in the draft of $schema")
        if keyword == "const" and self._draft == _DRAFT_4:
            raise _refuse(where, f"keyword {keyword} does not exist in the draft of $schema")
        if keyword in _SCHEMA_LISTS or (keyword == "items" and isinstance(value, list)):
            self._list_of_schemas(value, where, depth)
        elif keyword in ("items", "additionalItems", "additionalProperties"):
            self.schema(value, where, depth + 1)
        elif keyword in ("properties", "patternProperties"):
            for name, schema in _object(value, where).items():
                self.schema(schema, f"{where}/{name}", depth + 1)
        elif keyword == "$ref":
            self.schema(self._target(value, where), str(value), depth + 1)
        elif keyword in ("exclusiveMinimum", "exclusiveMaximum") and self._draft == _DRAFT_4:
            if not isinstance(value, bool):
                raise _refuse(where, f"must be true or false in draft 4, got {shown(value)}")
        elif keyword in ("$id", "id"):
            if where.count("/") > 1:
                raise _refuse(where, f"keyword {keyword} is supported at the root only")
        elif keyword in _CHECKS:
            _CHECKS[keyword](value, where)
        elif keyword not in ANNOTATIONS and (keyword == "x-guidance" or keyword[:2] != "x-"):
            raise _refuse(where, f"keyword {shown(keyword)} is not supported")

    def _list_of_schemas(self, value: object, where: str, depth: int) -> None:
        if not isinstance(value, list) or not value:
            raise _refuse(where, f"must be a list of at least one schema, got {shown(value)}")
        for number, schema in enumerate(value):
            self.schema(schema, f"{where}/{number}", depth + 1)

    def _target(self, ref: object, where: str) -> object:
        """What a reference inside the document points at."""
        if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
            raise _refuse(
                where,
                f'$ref must be "#" or begin with "#/" (no remote or named ones), got {shown(ref)}',
            )
        node: Any = self._root
        for part in ref.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                raise _refuse(where, f"$ref {shown(ref)} points at nothing")
        return node

    def _minimum_of_properties(self, node: dict[str, Any], where: str) -> None:
        """A name that is written twice would count twice in the grammar and once in the value."""
        least = node.get("minProperties", 0)
        if least > max(1, len(node.get("required", ()))):
            raise _refuse(
                f"{where}/minProperties",
                "minProperties above 1 is supported only up to the number of required properties, "
                f"got {least}",
            )


_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(where, f"must be an object, got {shown(value)}")
    return value


def _type(value: object, where: str) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in TYPES for name in names):
        raise _refuse(where, f"must be one or several of {', '.join(TYPES)}, got {shown(value)}")


def _count(value: object, where: str) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not 0 <= value <= MAX_COUNT:  # type: ignore[operator]
        raise _refuse(where, f"must be an integer in [0, 2**31 - 1], got {shown(value)}")


def _number(value: object, where: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -MAX_EXACT <= value <= MAX_EXACT:  # type: ignore[operator]
        raise _refuse(where, f"must be a number in [-2**53, 2**53], got {shown(value)}")


def _multiple(value: object, where: str) -> None:
    _number(value, where)
    if value <= 0:  # type: ignore[operator]
        raise _refuse(where, f"must be above 0, got {shown(value)}")


def _text(value: object, where: str) -> None:
    if not isinstance(value, str):
        raise _refuse(where, f"must be a text, got {shown(value)}")


def _format(value: object, where: str) -> None:
    if not isinstance(value, str) or value not in FORMATS:
        raise _refuse(where, f"format must be one of {', '.join(FORMATS)}, got {shown(value)}")


def _names(value: object, where: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _refuse(where, f"must be a list of names, got {shown(value)}")
    if len(set(value)) < len(value):
        raise _refuse(where, f"must name each property once, got {shown(value)}")


def _literal(value: object, where: str) -> None:
    """A value that stands for itself; its numbers must be exact."""
    if isinstance(value, list):
        for one in value:
            _literal(one, where)
    elif isinstance(value, dict):
        for one in value.values():
            _literal(one, where)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _number(value, where)


def _literals(value: object, where: str) -> None:
    if not isinstance(value, list) or not value:
        raise _refuse(where, f"must be a list of at least one value, got {shown(value)}")
    _literal(value, where)


_CHECKS: dict[str, Callable[[Any, str], object]] = {
    "$defs": _object,  # schemas in it count where a $ref points at them
    "definitions": _object,
    "type": _type,
    "enum": _literals,
    "const": _literal,
    "minLength": _count,
    "maxLength": _count,
    "pattern": _text,
    "format": _format,
    "minItems": _count,
    "maxItems": _count,
    "minProperties": _count,
    "maxProperties": _count,
    "required": _names,
    "minimum": _number,
    "maximum": _number,
    "exclusiveMinimum": _number,
    "exclusiveMaximum": _number,
    "multipleOf": _multiple,
}
