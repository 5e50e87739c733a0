"""StructuredOutputs: what is taken, and what is refused by the name of its field."""

import json

import pytest

from jaxserve import structured_outputs as limits
from jaxserve.errors import InvalidRequestError
from jaxserve.structured_outputs import StructuredOutputs


def refused(param: str, match: str, **given: object) -> None:
    with pytest.raises(InvalidRequestError, match=match) as caught:
        StructuredOutputs(**given)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_a_schema_is_kept_as_text_in_its_own_order():
    schema = {"type": "object", "properties": {"z": {}, "a": {"const": "é"}}}
    one = StructuredOutputs(json=schema)
    schema.clear()
    assert one.json == '{"type":"object","properties":{"z":{},"a":{"const":"é"}}}'
    assert StructuredOutputs(json=json.dumps(json.loads(one.json), indent=3)) == one
    assert one.kind == "json"
    assert hash(one) == hash(StructuredOutputs(json=one.json))


def test_every_kind_is_taken_alone():
    assert StructuredOutputs(json_object=True).kind == "json_object"
    assert StructuredOutputs(regex="a+").kind == "regex"
    assert StructuredOutputs(choice=["b", "a", "b"]).choice == ("b", "a")
    assert StructuredOutputs(grammar='start: "a"').kind == "grammar"
    assert StructuredOutputs(json_object=False, regex="a").kind == "regex"


def test_exactly_one_is_given():
    refused("structured_outputs", "exactly one of json, json_object, .*got none of them")
    refused("structured_outputs", "got regex and choice", regex="a", choice=["a"])
    refused("structured_outputs", "got none of them", json_object=False)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("json", "", "not empty"),
        ("json", "{", "is not JSON"),
        ("json", "[1]", r"a JSON object \(a schema\), got \[1\]"),
        ("json", True, "a JSON object"),
        ("json", '{"minimum": NaN}', "NaN is no JSON number"),
        ("json", {"minimum": float("nan")}, "is not JSON"),
        ("json", {"minimum": 1, 2: 3}, "texts as keys, got 2"),
        ("json", {"default": object()}, "is not JSON"),
        ("json", {"title": "\ud800"}, "lone surrogate"),
        ("json_object", 1, "true or false, got 1"),
        ("regex", "", "not empty"),
        ("regex", 5, "a text"),
        ("regex", "\udfff", "lone surrogate"),
        ("regex", "a" * (limits.MAX_REGEX_BYTES + 1), "16384 bytes or fewer, got 16385"),
        ("choice", [], "at least one text"),
        ("choice", "abc", "a list of texts"),
        ("choice", ["a", ""], "not empty"),
        ("choice", ["a", 1], "a text that is not empty, got 1"),
        ("choice", ["a"] * (limits.MAX_TEXT_CHOICES + 1), "10000"),
        ("choice", ["é" * limits.MAX_CHOICE_BYTES], "16384 bytes or fewer, got 32768"),
        ("choice", [str(i) * 8000 for i in range(10, 30)], "262144 bytes or fewer in all"),
        ("grammar", b"start: x", "a text"),
        ("grammar", "x" * (limits.MAX_GRAMMAR_BYTES + 1), "65536 bytes or fewer"),
    ],
)
def test_bad_values_are_refused(field, value, match):
    refused(f"structured_outputs.{field}", match, **{field: value})


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_depth_and_size_of_a_schema_are_bounded():
    most = limits.MAX_SCHEMA_DEPTH
    assert StructuredOutputs(json=nested(most)).kind == "json"
    refused("structured_outputs.json", f"{most} or fewer", json=nested(most + 1))
    deep = '{"items":' * 100_000 + "{}" + "}" * 100_000
    refused("structured_outputs.json", "262144 bytes or fewer", json=deep)
    refused(
        "structured_outputs.json", "is not JSON|inside each other", json=deep[899_900:1_000_102]
    )
    title = "x" * limits.MAX_SCHEMA_BYTES
    refused("structured_outputs.json", "bytes or fewer", json={"title": title})
    loop: dict = {}
    loop["items"] = loop
    refused("structured_outputs.json", "inside each other", json=loop)


def test_a_mapping_has_the_names_of_the_fields():
    one = StructuredOutputs.from_value({"choice": ["a"]})
    assert one == StructuredOutputs(choice=("a",))
    assert StructuredOutputs.from_value(one) is one
    for value, match in (
        ("regex", "an object with one of"),
        ({"reggex": "a"}, "no field 'reggex'"),
    ):
        with pytest.raises(InvalidRequestError, match=match) as caught:
            StructuredOutputs.from_value(value)
        assert caught.value.param == "structured_outputs"
