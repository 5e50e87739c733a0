"""plan_tools: what is refused, and what each tool_choice makes of prompt, sampling and reply."""

import json
from typing import Any

import numpy as np
import pytest

from jaxserve.constraints.grammar import GrammarCompiler
from jaxserve.errors import InvalidRequestError
from jaxserve.server.tools.call_grammar import MAX_FORCED_CALLS
from jaxserve.server.tools.choice import MAX_NAME_CHARS, MAX_TOOLS_BYTES, ToolPlan, plan_tools
from jaxserve.server.tools.parser import PARSERS
from jaxserve.structured_outputs import StructuredOutputs
from jaxserve.text.chat_template import MAX_TOOLS
from tests.constraints.walks import allowed_ids, walk
from tests.server.tools.parsing import read
from tests.text.tokenizers_for_tests import byte_level

TOKENIZER = byte_level()
V = TOKENIZER.get_vocab_size()
END = TOKENIZER.token_to_id("<|im_end|>")
COMPILER = GrammarCompiler(TOKENIZER.to_str(), end_ids=[END], vocab_size=V)

SCHEMA = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/n"}, "on": {"type": "boolean"}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"n": {"enum": [1, 2]}},
}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: object, *names: str) -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]},
    }


F = tool("f", description="does f", parameters=SCHEMA)
G = tool("g", strict=False)
STRICT = tool("f", parameters=SCHEMA, strict=True)


def plan(
    tools: object = (F, G), choice: object = None, parallel: object = None, **more: Any
) -> ToolPlan:
    parser = more.pop("parser", "hermes")
    tools = list(tools) if isinstance(tools, tuple) else tools
    return plan_tools(tools, choice, parallel, parser, **more)


def names(plan: ToolPlan) -> list[str] | None:
    tools = plan.tools_for_template
    return None if tools is None else [one["function"]["name"] for one in tools]


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_without_tools_nothing_happens(tools, choice):
    wanted = StructuredOutputs(json_object=True)
    assert plan(tools, choice, True, parser=None) == ToolPlan()
    assert plan(tools, choice, text_format=wanted) == ToolPlan(structured_outputs=wanted)


def test_none_does_not_tell_the_model_of_tools():
    assert plan(choice="none", parser=None) == ToolPlan()


@pytest.mark.parametrize("choice", [None, "auto"])
def test_auto_leaves_the_model_free(choice):
    found = plan(choice=choice)
    assert (names(found), found.structured_outputs, found.max_calls) == (["f", "g"], None, None)
    assert found.parses
    assert not found.live
    assert found.tools_for_template == [F, tool("g")]
    assert plan(choice=choice, parallel=False).max_calls == 1


def test_auto_without_a_parser_says_how_to_get_one():
    refused(
        'tool_choice "auto" needs a tool parser.*--tool_call_parser', "tool_choice", parser=None
    )


@pytest.mark.parametrize("parser", [None, *PARSERS])
def test_required_and_named_calls_are_forced_in_the_format_of_the_parser(parser):
    required = plan(choice="required", parser=parser)
    one = plan(choice="required", parser=parser, parallel=False)
    g = plan(choice=named("g"), parser=parser)
    for found in (required, one, g):
        assert found.live
        assert found.parser_name == (parser or "hermes")
    assert (names(required), names(g)) == (["f", "g"], ["g"])
    assert (required.max_calls, one.max_calls, g.max_calls) == (None, 1, 1)
    for seed in range(8):
        calls = sampled_calls(required, seed)
        assert 1 <= len(calls) <= MAX_FORCED_CALLS
        assert len(sampled_calls(one, seed)) == 1
        assert sampled_calls(g, seed) == [("g", {})]
        for name, arguments in calls:
            assert name in ("f", "g")
            assert arguments["n"] in (1, 2) if name == "f" else arguments == {}


def test_allowed_tools_are_those_that_the_model_is_told_of():
    auto = plan(choice=allowed("auto", "g"))
    assert (names(auto), auto.structured_outputs) == (["g"], None)
    required = plan(choice=allowed("required", "g"), parallel=False)
    assert sampled_calls(required, 0) == [("g", {})]


@pytest.mark.parametrize("parser", PARSERS)
def test_strict_functions_are_held_to_their_schemas_when_they_are_called(parser):
    found = plan((STRICT, G), "auto", parser=parser)
    assert found.live
    assert found.tools_for_template == [tool("f", parameters=SCHEMA), tool("g")]
    right = write(parser, "f", '{"n": 2}')
    for text in ("Hello {x}\nthere", "", right, write(parser, "g", '{"any": [1]}')):
        assert accepts(found, text), text
    for text in (
        write(parser, "f", '{"n": 3}'),
        write(parser, "f", "{}"),
        write(parser, "h", "{}"),
    ):
        assert not accepts(found, text), text
    assert accepts(found, f"Well. {right} so {right}")
    assert not accepts(plan((STRICT,), "auto", parser=parser), f"x\n{write(parser, 'f', '{}')}")


@pytest.mark.parametrize(
    ("more", "ok"),
    [
        ({}, False),
        ({"additionalProperties": {"type": "null"}}, True),
        ({"anyOf": [{"type": "object"}]}, True),
    ],
)
def test_arguments_have_no_names_that_the_function_does_not_give_them(more, ok):
    parameters = {"properties": {"n": {"type": "integer"}}, "required": ["n"], **more}
    found = plan((tool("f", parameters=parameters),), "required")
    assert accepts(found, write("hermes", "f", '{"n": 1}'))
    assert accepts(found, write("hermes", "f", '{"n": 1, "m": null}')) == ok


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("strict", [True, False])
def test_a_text_format_is_that_of_the_text_beside_calls(parser, strict):
    tools = (tool("f", parameters=SCHEMA, strict=strict),)
    integer = plan(tools, parser=parser, text_format=StructuredOutputs(json={"type": "integer"}))
    assert accepts(integer, "12")
    assert accepts(integer, write(parser, "f", '{"n": 1}'))
    assert accepts(integer, write(parser, "f", '{"n": 3}')) == (not strict)
    assert not accepts(integer, "hello")
    choice = plan(tools, parser=parser, text_format=StructuredOutputs(choice=["yes", 'n"o']))
    assert accepts(choice, 'n"o')
    assert not accepts(choice, "no")
    anything = plan(tools, parser=parser, text_format=StructuredOutputs(json_object=True))
    assert accepts(anything, '{"a": 1}')
    refused(
        "structured_outputs.regex cannot be used with tools",
        "structured_outputs",
        parser=parser,
        text_format=StructuredOutputs(regex="a"),
    )
    forced = plan(tools, "required", parser=parser, text_format=StructuredOutputs(regex="a"))
    assert not accepts(forced, "a")


def write(parser: str, name: str, arguments: str) -> str:
    if parser == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def accepts(found: ToolPlan, text: str) -> bool:
    """Whether the text can be sampled from its beginning to its end."""
    assert found.structured_outputs is not None
    one = COMPILER.constraint(found.structured_outputs)
    tokens = [*TOKENIZER.encode(text).ids, END]
    return all(token in allowed_ids(one, tokens[:i], V) for i, token in enumerate(tokens))


def sampled_calls(found: ToolPlan, seed: int) -> list[tuple[str, Any]]:
    """The calls of a random text of the grammar, as the parser of the plan reads them."""
    assert found.structured_outputs is not None
    assert found.parser_name is not None
    rng = np.random.default_rng(seed)
    constraint = COMPILER.constraint(found.structured_outputs)
    tokens = walk(constraint, rng, end_ids=[END], vocab_size=V, max_tokens=4000)
    assert tokens[-1] == END
    reply = read(found.parser_name, [TOKENIZER.decode([token]) for token in tokens[:-1]], live=True)
    assert reply.content == ""
    return [(name, json.loads(arguments)) for name, arguments in reply.calls]


def refused(match: str, param: str, *args: Any, **more: Any) -> None:
    with pytest.raises(InvalidRequestError, match=match) as caught:
        plan(*args, **more)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("tools", "match"),
    [
        ({}, "tools must be a list"),
        ("f", "tools must be a list"),
        ([7], r"tools\[0\] must be"),
        ([{"type": "custom", "custom": {"name": "f"}}], r"tools\[0\] must be"),
        ([{"type": "function"}], r"tools\[0\].function must be an object"),
        ([tool("")], r"tools\[0\].function.name must be"),
        ([tool("a b")], r"tools\[0\].function.name must have 64 or fewer"),
        ([tool("ä")], r"tools\[0\].function.name must have 64 or fewer"),
        ([tool('"')], r"tools\[0\].function.name must have 64 or fewer"),
        ([tool("f" * (MAX_NAME_CHARS + 1))], r"tools\[0\].function.name must have 64 or fewer"),
        ([F, F], r"tools\[1\].function.name must differ from the others, got 'f'"),
        ([tool("f", strict=1)], r"tools\[0\].function.strict must be a boolean, got 1"),
        ([tool("f", parameters=[])], r"tools\[0\].function.parameters must be an object"),
        ([tool("f", description=7)], r"tools\[0\].function.description must be a text"),
        ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools must be 128 or fewer, got 129"),
        ([tool("f", description="x" * MAX_TOOLS_BYTES)], "tools must have 524288 bytes or fewer"),
    ],
)
def test_malformed_tools_are_refused_whatever_the_choice(tools, match):
    for choice in (None, "auto", "none", "required"):
        refused(match, "tools", tools, choice)


@pytest.mark.parametrize(
    ("choice", "match"),
    [
        ("any", "tool_choice must be"),
        (7, "tool_choice must be"),
        (["auto"], "tool_choice must be"),
        ({}, "tool_choice must be"),
        ({"type": "custom", "custom": {"name": "f"}}, "tool_choice must be"),
        ({"type": "function"}, "tool_choice must be"),
        (
            named("h"),
            r"tool_choice.function.name must be one of the tools' \(\['f', 'g'\]\), got 'h'",
        ),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools must be an object"),
        (allowed("none", "f"), "tool_choice.allowed_tools.mode must be"),
        (allowed([], "f"), "tool_choice.allowed_tools.mode must be"),
        (allowed("auto"), "tool_choice.allowed_tools.tools must be a list"),
        (allowed("auto", "f", "h"), r"allowed_tools.tools\[1\].function.name must be one of"),
    ],
)
def test_malformed_choices_are_refused(choice, match):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        plan(choice=choice)
    assert str(caught.value.param).startswith("tool_choice")


@pytest.mark.parametrize("choice", ["required", named("f"), allowed("auto", "f"), "any"])
def test_a_choice_needs_tools(choice):
    refused("needs tools, and there are none", "tool_choice", None, choice)


@pytest.mark.parametrize("value", ["yes", 1, []])
def test_parallel_tool_calls_is_a_boolean(value):
    refused("parallel_tool_calls must be a boolean", "parallel_tool_calls", None, None, value)


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"type": "array"}, "the parameters of f must have the type \"object\", got 'array'"),
        ({"not": {}}, "the parameters of f cannot be served at '#/not'.*not supported"),
        ({"properties": {"a": {"$ref": "#/x"}}}, "the parameters of f cannot be served at .* at nothing"),
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_held_are_refused_where_they_would_be(parameters, match):
    refused(match, "tools", (tool("f", parameters=parameters),), "required")
    refused(match, "tools", (tool("f", parameters=parameters, strict=True),))
    assert plan((tool("f", parameters=parameters),)).structured_outputs is None


def test_schemas_that_are_too_large_together_are_refused_by_the_field():
    large = {"type": "object", "properties": {"a": {"enum": ["x" * 70_000]}}}
    refused(
        "tools have schemas that are too large", "tools", (tool("f", parameters=large),), "required"
    )
