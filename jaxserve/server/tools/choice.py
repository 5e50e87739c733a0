"""What a chat request says about tools, checked, and what follows from it: `plan_tools`.

Called by `openai.chat` before the prompt is rendered.

Rules: "auto" (the default) leaves the model free; its text is read by the parser. "required" and a named
function hold it to calls with a grammar, in the format that the parser reads. `strict` functions are held
to their schemas with "auto" too. Held arguments have no other names than the schema's properties, unless it
says something of others. With "none" the model is not told of the tools.
"""

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxserve.constraints.json_schema import FIELD as SCHEMA_FIELD
from jaxserve.constraints.json_schema import checked_schema
from jaxserve.errors import InvalidRequestError, shown
from jaxserve.field_checks import require, require_bool
from jaxserve.server.tools.call_grammar import (
    MAX_FORCED_CALLS,
    calls_in_text,
    calls_or,
    forced_calls,
)
from jaxserve.server.tools.parser import PARSERS, ToolParser, make_parser
from jaxserve.structured_outputs import StructuredOutputs
from jaxserve.text.chat_template import check_tools

MAX_NAME_CHARS = 64
MAX_TOOLS_BYTES = 512 * 1024  # all of them together, as compact JSON
DEFAULT_FORMAT = "hermes"  # of forced calls, where the model has none of its own
# Where one of these stands beside properties, arguments may have other names.
_OPEN_KEYWORDS = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
_NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_-")
# Where one of these stands beside properties, arguments may have other names.
_OPEN_KEYWORDS = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
_MODES = ("none", "auto", "required")
_CHOICE = (
    '"none", "auto", "required", {"type": "function", "function": {"name": ...}} or {"type": '
    '"allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
)


@dataclass(frozen=True, kw_only=True)
class ToolPlan:
    """What a request's tools mean for its prompt, its sampling and its reply.

    Args:
        tools_for_template: for the chat template; None = it is not told of any.
        structured_outputs: what the text must be, the request's own format included; None = anything.
        parser_name: the format that the reply is read in; None = it is not read.
        live: whether a grammar holds every call to the format, see `make_parser`.
        max_calls: calls beyond are left out of the reply; None = any number.
    """

    tools_for_template: list[dict[str, Any]] | None = None
    structured_outputs: StructuredOutputs | None = None
    parser_name: str | None = None
    live: bool = False
    max_calls: int | None = None

    @property
    def parses(self) -> bool:
        """Whether the reply is read by a parser. Then special tokens are part of the text (a mark may be
        one), unless the request says otherwise.
        """
        return self.parser_name is not None

    def parser(self) -> ToolParser:
        """A parser for one choice; only where `parses`."""
        assert self.parser_name is not None
        return make_parser(self.parser_name, live=self.live, max_calls=self.max_calls)


def plan_tools(
    tools: object,
    tool_choice: object,
    parallel_tool_calls: object,
    parser_name: str | None,
    *,
    text_format: StructuredOutputs | None = None,
) -> ToolPlan:
    """Checks the fields and says what follows from them.

    Args:
        tools, tool_choice, parallel_tool_calls: as the body has them; None = absent.
        parser_name: the server's tool parser; None = it has none.
        text_format: what the request wants its text to be.

    Raises:
        InvalidRequestError: param "tools", "tool_choice", "parallel_tool_calls" or "structured_outputs".
    """
    if parallel_tool_calls is not None:
        require_bool("parallel_tool_calls", parallel_tool_calls)
    checked = _checked_tools(tools)
    mode, names = _checked_choice(tool_choice, [tool["function"]["name"] for tool in checked])
    if mode == "none":
        return ToolPlan(structured_outputs=text_format)
    chosen = [tool for tool in checked if tool["function"]["name"] in names]
    is_named = isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function"
    max_calls = 1 if is_named or parallel_tool_calls is False else None
    if mode == "auto" and parser_name is None:
        _refuse(
            'tool_choice "auto" needs a tool parser, and this server has none for this model; it is started '
            f'with one by --tool_call_parser={" or ".join(PARSERS)}. "none", "required" and a named '
            "function need none",
            "tool_choice",
        )
    parser_name = parser_name or DEFAULT_FORMAT
    wanted = _wanted_text(mode, chosen, parser_name, max_calls or MAX_FORCED_CALLS, text_format)
    return ToolPlan(
        tools_for_template=[_for_template(tool) for tool in chosen],
        structured_outputs=wanted,
        parser_name=parser_name,
        live=wanted is not None,
        max_calls=max_calls,
    )


def _wanted_text(
    mode: str,
    tools: Sequence[Mapping[str, Any]],
    parser_name: str,
    max_calls: int,
    text_format: StructuredOutputs | None,
) -> StructuredOutputs | None:
    """What the text must be so that calls are what they have to be; None = anything."""
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if mode == "auto" and text_format is None and not is_strict:
        return None
    functions = [
        (tool["function"]["name"], _arguments_schema(tool["function"], mode)) for tool in tools
    ]
    if mode == "required":
        grammar = forced_calls(parser_name, functions, max_calls=max_calls)
    elif text_format is not None:
        grammar = calls_or(parser_name, functions, text_format, max_calls=max_calls)
    else:
        grammar = calls_in_text(parser_name, functions, max_calls=max_calls)
    try:
        return StructuredOutputs(grammar=grammar)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"tools have schemas that are too large to hold calls to them: {error.message}",
            param="tools",
        ) from error


def _arguments_schema(function: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """The schema of a function's arguments: always one of objects."""
    if mode == "auto" and not function.get("strict"):
        return {"type": "object"}
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    name = f"tools: the parameters of {function['name']}"
    if schema.get("type", "object") != "object":
        _refuse(f'{name} must have the type "object", got {shown(schema["type"])}', "tools")
    schema = {"type": "object", **schema}
    if "properties" in schema and not _OPEN_KEYWORDS & schema.keys():
        schema["additionalProperties"] = (
            False  # a function has no other parameters than those it names
        )
    try:
        checked_schema(json.dumps(schema))
    except InvalidRequestError as error:
        _refuse(f"{name} cannot be served{error.message.removeprefix(SCHEMA_FIELD)}", "tools")
    return schema


def _checked_tools(tools: object) -> list[dict[str, Any]]:
    checked = check_tools(tools) or []
    names: set[str] = set()
    for i, tool in enumerate(checked):
        name = tool["function"]["name"]
        where = f"tools[{i}].function"
        if len(name) > MAX_NAME_CHARS or not _NAME_CHARS.issuperset(name):
            _refuse(
                f"{where}.name must have {MAX_NAME_CHARS} or fewer of the characters a-z, A-Z, 0-9, _ "
                f"and -, got {shown(name)}",
                "tools",
            )
        if name in names:
            _refuse(f"{where}.name must differ from the others, got {name!r} again", "tools")
        names.add(name)
        strict = tool["function"].get("strict")
        if strict is not None and not isinstance(strict, bool):
            _refuse(f"{where}.strict must be a boolean, got {shown(strict)}", "tools")
    size = len(json.dumps(checked, separators=(",", ":")))
    if size > MAX_TOOLS_BYTES:
        _refuse(f"tools must have {MAX_TOOLS_BYTES} bytes or fewer as JSON, got {size}", "tools")
    return checked


def _checked_choice(choice: object, names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """(the mode, the functions that may be called)."""
    if choice is None:
        return ("auto" if names else "none"), names
    require(isinstance(choice, str | Mapping), "tool_choice", choice, _CHOICE)
    if choice in ("none", "auto") and not names:
        return "none", ()
    if not names:
        _refuse(f"tool_choice {shown(choice)} needs tools, and there are none", "tool_choice")
    if isinstance(choice, str):
        require(choice in _MODES, "tool_choice", choice, _CHOICE)
        return choice, names
    assert isinstance(choice, Mapping)
    if choice.get("type") == "function":
        return "required", (_known_name(choice, names, "tool_choice"),)
    require(choice.get("type") == "allowed_tools", "tool_choice", choice, _CHOICE)
    allowed = choice.get("allowed_tools")
    require(isinstance(allowed, Mapping), "tool_choice.allowed_tools", allowed, "an object")
    assert isinstance(allowed, Mapping)
    mode, tools = allowed.get("mode"), allowed.get("tools")
    where = "tool_choice.allowed_tools"
    require(mode in ("auto", "required"), f"{where}.mode", mode, '"auto" or "required"')
    require(isinstance(tools, list) and bool(tools), f"{where}.tools", tools, "a list of functions")
    assert isinstance(tools, list)
    known = [_known_name(tool, names, f"{where}.tools[{i}]") for i, tool in enumerate(tools)]
    return str(mode), known


def _known_name(value: object, names: Sequence[str], where: str) -> str:
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    require(isinstance(name, str), where, value, '{"type": "function", "function": {"name": ...}}')
    if name not in names:
        _refuse(
            f"{where}.function.name must be one of the tools' ({shown(list(names))}), got {shown(name)}",
            "tool_choice",
        )
    return str(name)


def _for_template(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool without what is said to the server alone."""
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {**tool, "function": function}


def _refuse(message: str, param: str) -> NoReturn:
    raise InvalidRequestError(message, param=param)
