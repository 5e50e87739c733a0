"""Which JSON schemas are served: what is not enforced is refused, by its name and place."""

import json

import pytest

from jaxserve.constraints.json_schema import FORMATS, MAX_REF_DEPTH, checked_schema
from jaxserve.errors import InvalidRequestError

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def refused(schema: object, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match) as caught:
        checked_schema(json.dumps(schema))
    assert caught.value.param == "structured_outputs.json"


@pytest.mark.parametrize(
    "keyword",
    [
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "propertyNames",
        "dependencies",
        "dependentSchemas",
        "dependentRequired",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "nullable",
        "maxLenght",
        "x-guidance",
    ],
)
def test_an_unsupported_keyword_is_named(keyword):
    escaped = keyword.replace("$", r"\$")
    refused({keyword: {}}, f"at '#/{escaped}': keyword '{escaped}' is not supported")
    inside = {"properties": {"a": {"items": {"anyOf": [{}, {keyword: True}]}}}}
    refused(inside, f"at '#/properties/a/items/anyOf/1/{escaped}'")


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ({"uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"$ref": "https://example.com/x.json"}, "no remote or named ones"),
        ({"$ref": "#name"}, "no remote or named ones"),
        ({"$ref": "#/$defs/a"}, "points at nothing"),
        ({"$ref": "#/anyOf/7", "anyOf": [{}]}, "points at nothing"),
        ({"$ref": 3}, "no remote or named ones"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "at '#/\\$defs/a/not'"),
        ({"$ref": "#/x-my/a~1b%25", "x-my": {"a/b%": 3}}, "an object or a boolean, got 3"),
        ({"items": {"$id": "x"}}, r"\$id is supported at the root only"),
        ({"items": {"$schema": DRAFT_7}}, "at the root only"),
        ({"$schema": "https://example.com/mine"}, r"\$schema must be one of"),
        ({"$schema": DRAFT_7, "prefixItems": [{}]}, "prefixItems does not exist in the draft"),
        ({"$schema": DRAFT_4, "const": 1}, "const does not exist in the draft"),
        ({"$schema": DRAFT_4, "exclusiveMinimum": 1}, "true or false in draft 4"),
        ({"exclusiveMinimum": True, "minimum": 1}, "a number in"),
        ({"format": "regex"}, "format must be one of date-time"),
        ({"format": 1}, "format must be one of date-time"),
        ({"type": "text"}, "one or several of null, boolean"),
        ({"type": []}, "one or several of null, boolean"),
        ({"type": ["string", 1]}, "one or several of null, boolean"),
        ({"type": "integer", "minLength": "3"}, "an integer in"),
        ({"maxLength": True}, "an integer in"),
        ({"maxItems": -1}, "an integer in"),
        ({"maxItems": 2.5}, "an integer in"),
        ({"maxItems": 2**31}, "an integer in"),
        ({"minimum": "1"}, "a number in"),
        ({"minimum": 2**53 + 1}, r"a number in \[-2\*\*53, 2\*\*53\]"),
        ({"const": {"a": [1e300]}}, "a number in"),
        ({"enum": [1, 12345678901234567890]}, "a number in"),
        ({"enum": []}, "at least one value"),
        ({"enum": "a"}, "at least one value"),
        ({"multipleOf": 0}, "above 0"),
        ({"pattern": 1}, "must be a text"),
        ({"required": "a"}, "a list of names"),
        ({"required": ["a", "a"]}, "each property once"),
        ({"properties": [1]}, "must be an object"),
        ({"properties": {"a": 1}}, "an object or a boolean, got 1"),
        ({"$defs": 1}, "must be an object"),
        ({"anyOf": []}, "at least one schema"),
        ({"oneOf": {}}, "at least one schema"),
        ({"items": []}, "at least one schema"),
        ({"minProperties": 2}, "up to the number of required properties, got 2"),
        ({"minProperties": 3, "required": ["a", "b"]}, "got 3"),
    ],
)
def test_what_is_not_enforced_is_refused(schema, match):
    refused(schema, match)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$schema": DRAFT_4, "minimum": 1, "exclusiveMinimum": True, "id": "http://x/y"},
        {"$schema": DRAFT_7, "items": [{}, False], "additionalItems": False, "$id": "http://x/y"},
        {"prefixItems": [{}], "items": False},
        {"title": 3, "description": "", "default": {"not": 1}},
        {"examples": [], "deprecated": True, "readOnly": True, "x-order": 3, "$comment": ""},
        {"properties": {"not": {}, "uniqueItems": {"type": "string"}}, "required": ["not"]},
        {"enum": [{"not": 1, "contains": [2**53, -0.5, None, True]}], "const": {"if": 1}},
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"items": {"$ref": "#"}}, "b": {"not": {}}}},
        {"anyOf": [{"$ref": "#/anyOf/1"}, {"type": ["string", "null"]}]},
        {"minProperties": 2, "required": ["a", "b"]},
        {"minProperties": 1, "maxProperties": 3, "patternProperties": {"^a": True}},
        *({"type": "string", "format": name} for name in FORMATS),
    ],
)
def test_what_is_enforced_or_says_nothing_passes_unchanged(schema):
    assert json.loads(checked_schema(json.dumps(schema))) == schema


def test_a_keyword_that_demands_nothing_is_dropped():
    schema = {"items": {"uniqueItems": False, "type": "array"}}
    assert checked_schema(json.dumps(schema)) == '{"items":{"type":"array"}}'


def test_a_chain_of_references_is_bounded():
    def chain(length: int) -> dict:
        links = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(length)}
        return {"$ref": "#/$defs/0", "$defs": {**links, str(length): {"type": "null"}}}

    assert checked_schema(json.dumps(chain(MAX_REF_DEPTH - 1)))
    refused(chain(MAX_REF_DEPTH), "more than 128 schemas inside each other")
