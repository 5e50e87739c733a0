"""Random texts under schemas of the kinds people write: they end, and jsonschema accepts them."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from jaxserve.constraints.grammar import GrammarCompiler
from jaxserve.structured_outputs import StructuredOutputs
from jaxserve.text.tokenizer import Tokenizer
from tests.constraints.walks import allowed_ids, walk
from tests.text.tokenizers_for_tests import byte_level, wrap

SAMPLES = 20  # of each schema
MAX_TOKENS = 250

PERSON = {
    "type": "object",
    "title": "Person",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "id": {"type": "string", "pattern": "^[A-Z]{2}-\\d{4}$"},
        "born": {"type": "string", "format": "date"},
        "nickname": {
            "anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}],
            "default": None,
        },
    },
    "required": ["name", "age", "id", "born"],
    "additionalProperties": False,
}
SCHEMAS = {
    "person": PERSON,
    "enum behind $ref": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {
            "Color": {"enum": ["red", "green", "blau"], "title": "Color", "type": "string"},
            "Size": {"enum": [1, 2.5, None, True]},
        },
        "type": "object",
        "properties": {
            "colors": {"type": "array", "items": {"$ref": "#/$defs/Color"}, "maxItems": 3},
            "size": {"$ref": "#/$defs/Size", "description": "of it"},
        },
        "required": ["colors", "size"],
        "additionalProperties": False,
    },
    "recursion": {
        "definitions": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": -9, "maximum": 9},
                    "next": {"anyOf": [{"$ref": "#/definitions/node"}, {"type": "null"}]},
                    "children": {
                        "type": "array",
                        "items": {"$ref": "#/definitions/node"},
                        "maxItems": 1,
                    },
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/definitions/node",
    },
    "non-ASCII": {
        "type": "object",
        "properties": {
            "größe": {"const": "überall"},
            "名前": {"enum": ["日本", "한국", "🙂 \u2028"]},
            "text": {"type": "string", "maxLength": 4},
        },
        "required": ["größe", "名前", "text"],
        "additionalProperties": False,
    },
    "nested arrays": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "type": "array",
            "prefixItems": [{"type": "boolean"}, {"type": "string", "maxLength": 3}],
            "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            "minItems": 1,
            "maxItems": 4,
        },
    },
    "a kind by its const": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "circle"}, "r": {"type": "number", "minimum": 0}},
                "required": ["kind", "r"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {
                    "kind": {"const": "square"},
                    "side": {"exclusiveMinimum": 0.5, "type": "number"},
                },
                "required": ["kind", "side"],
                "additionalProperties": False,
            },
        ],
        "discriminator": {"propertyName": "kind"},
    },
    "number ranges": {
        "type": "array",
        "prefixItems": [
            {"type": "integer", "minimum": -17, "exclusiveMaximum": 1234},
            {"type": "number", "exclusiveMinimum": -1.5, "maximum": 0.25},
            {"type": "integer", "multipleOf": 7},
            {"type": "number", "minimum": 1e-3, "maximum": 1e3},
            {"type": "integer", "minimum": 2**53 - 5, "maximum": 2**53},
        ],
        "items": False,
        "minItems": 5,
    },
    "parts together": {
        "allOf": [
            {
                "type": "object",
                "properties": {"a": {"type": "string", "maxLength": 6}},
                "required": ["a"],
            },
            {"properties": {"a": {"pattern": "^[a-f]+$"}, "b": {"type": ["integer", "null"]}}},
        ],
        "additionalProperties": False,
        "properties": {"a": True, "b": True},
    },
    "a map": {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
        "patternProperties": {"^x-": {"type": "boolean"}},
        "additionalProperties": {"type": "string", "maxLength": 2, "minLength": 1},
        "maxProperties": 3,
    },
    "old draft": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "pair": {
                "type": "array",
                "items": [
                    {"type": "string", "pattern": "b|^a.c$", "maxLength": 5},
                    {"type": "null"},
                ],
                "additionalItems": False,
            },
            "when": {"type": "string", "format": "date-time"},
            "ip": {"type": "string", "format": "ipv4"},
        },
        "required": ["pair"],
        "additionalProperties": False,
    },
}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def is_canonical(text: str) -> bool:
    """Outside strings, whitespace is one blank behind a comma or a colon."""
    outside = _STRING.sub('""', text)
    return re.search(r"\s", re.sub(r"([,:]) (?=[^\s\]}])", r"\1", outside)) is None


def check_samples(tokenizer: Tokenizer, compiler: GrammarCompiler, end_id: int) -> None:
    """Samples of every schema: most end, and then they are right; the others are accepted so far."""
    size = tokenizer.vocab_size
    num_ended = 0
    for seed, (name, schema) in enumerate(SCHEMAS.items()):
        rng = np.random.default_rng(seed)
        wanted = StructuredOutputs(json=schema)
        jsonschema.validators.validator_for(schema).check_schema(schema)
        for _ in range(SAMPLES):
            tokens = walk(
                compiler.constraint(wanted),
                rng,
                end_ids=[end_id],
                vocab_size=size,
                max_tokens=MAX_TOKENS,
            )
            if tokens[-1] != end_id:
                assert allowed_ids(compiler.constraint(wanted), tokens, size), name
                continue
            num_ended += 1
            text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
            jsonschema.validate(json.loads(text), schema)
            assert is_canonical(text), (name, text)
    assert num_ended >= 0.75 * SAMPLES * len(SCHEMAS)


def test_samples_of_bytes():
    tokenizer = wrap(byte_level(['" :', '{ "', ', "', '" ,', "[ ]", "r e", "Ġ Ġ", "Ċ Ċ"]))
    end_id = tokenizer.encode("<|im_end|>")[0]
    check_samples(
        tokenizer,
        GrammarCompiler(tokenizer.to_json(), end_ids=[end_id], vocab_size=tokenizer.vocab_size),
        end_id,
    )


@pytest.mark.real_model
@pytest.mark.slow
def test_samples_of_a_real_tokenizer(real_model_directory: Path):
    tokenizer = Tokenizer.from_directory(real_model_directory)
    end_id = tokenizer.eos_token_ids[0]
    check_samples(
        tokenizer,
        GrammarCompiler(tokenizer.to_json(), end_ids=[end_id], vocab_size=tokenizer.vocab_size),
        end_id,
    )


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('{"a": [1, "x  ,\n"]}', True),
        ('{"a":  1}', False),
        ("[1 ,2]", False),
        ("[1, ]", False),
        ("[1\n]", False),
    ],
)
def test_is_canonical_finds_whitespace(text, ok):
    assert is_canonical(text) is ok
