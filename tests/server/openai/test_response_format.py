import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.server.openai.response_format import structured_outputs_of
from jaxserve.structured_outputs import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def _format(**described):
    return {"response_format": {"type": "json_schema", "json_schema": described}}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (_format(name="a", schema=SCHEMA), StructuredOutputs(json=SCHEMA)),
        (_format(name="A_b-9" * 12, schema=SCHEMA, strict=None), StructuredOutputs(json=SCHEMA)),
        (_format(name="a", schema=SCHEMA, strict=False), StructuredOutputs(json=SCHEMA)),
        (_format(name="a"), StructuredOutputs(json_object=True)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        (
            {"structured_outputs": {"choice": ["x"], "json": None}},
            StructuredOutputs(choice=["x"]),
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            StructuredOutputs(regex="a"),
        ),
    ],
)
def test_what_is_wanted(fields, wanted):
    assert structured_outputs_of(fields) == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (_format(schema=SCHEMA), "response_format.json_schema.name"),
        (_format(name="x" * 65, schema=SCHEMA), "response_format.json_schema.name"),
        (_format(name="a b", schema=SCHEMA), "response_format.json_schema.name"),
        (_format(name="a\n", schema=SCHEMA), "response_format.json_schema.name"),
        (_format(name="a", schema="x"), "response_format.json_schema.schema"),
        (_format(name="a", schema=SCHEMA, strict=1), "response_format.json_schema.strict"),
        (_format(name="a", description=5), "response_format.json_schema.description"),
        (
            {**_format(name="a", schema=SCHEMA), "structured_outputs": {"regex": "a"}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["x"]}}, "structured_outputs"),
        ({"structured_outputs": {"guided_json": {}}}, "structured_outputs"),
        ({"structured_outputs": "x"}, "structured_outputs"),
    ],
)
def test_what_is_wrong_is_named(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        structured_outputs_of(fields)
    assert caught.value.param == param
