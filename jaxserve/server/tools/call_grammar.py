"""Grammars for texts that hold calls, in the format of a parser. Called by `choice`.

Arguments are written as `%json` schemas, each a rule of its own, so that its `$ref`s point into itself.

Invariant: the parser of the same name reads every text of these grammars without falling back to content.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.server.tools.hermes import CLOSE, OPEN
from jaxserve.structured_outputs import StructuredOutputs

MAX_FORCED_CALLS = 16  # in one message: a model that repeats itself would go on for ever
# Text in which a parser finds no call: for Llama, no line begins with a brace.
_ANY_TEXT = r"/(.|\n)*/"
_LLAMA_TEXT = r"/([ \t\r\n]*[^ \t\r\n{][^\n]*(\n([^\n{][^\n]*)?)*)?/"

Functions = Sequence[tuple[str, Mapping[str, Any]]]  # name -> schema of the arguments


def forced_calls(parser_name: str, functions: Functions, *, max_calls: int) -> str:
    """A text of one to `max_calls` calls and nothing else."""
    return f"start: {_calls(parser_name, max_calls)}\n{_call(parser_name, functions)}"


def calls_or(
    parser_name: str, functions: Functions, text_format: StructuredOutputs, *, max_calls: int
) -> str:
    """A text of calls, or one in the format that the request wants.

    Raises:
        InvalidRequestError: that format cannot be joined with calls.
    """
    if text_format.json is not None:
        other = f"%json {text_format.json}"
    elif text_format.json_object:
        other = '%json {"type":"object"}'
    elif text_format.choice is not None:
        other = " | ".join(json.dumps(text) for text in text_format.choice)
    else:
        raise InvalidRequestError(
            f"structured_outputs.{text_format.kind} cannot be used with tools; use json, json_object or "
            'choice, or tool_choice "none"',
            param="structured_outputs",
        )
    forced = _call(parser_name, functions)
    return f"start: {_calls(parser_name, max_calls)} | other\nother: {other}\n{forced}"


def calls_in_text(parser_name: str, functions: Functions, *, max_calls: int) -> str:
    """Free text, in which every call that begins is one of these."""
    if parser_name == "llama3_json":
        start = f"start: {_calls(parser_name, max_calls)} | TEXT\nTEXT: {_LLAMA_TEXT}\n"
        return start + _call(parser_name, functions)
    start = f"start: in_text{{0,{max_calls}}} TEXT\nTEXT: {_ANY_TEXT}\n"
    mark = f'mark[lazy]: TEXT "{OPEN}"\nin_text: mark "\\n" body "\\n{CLOSE}"\n'
    return start + mark + _bodies(parser_name, functions)


def _calls(parser_name: str, max_calls: int) -> str:
    separator = "; " if parser_name == "llama3_json" else "\n"
    return f"call ({json.dumps(separator)} call){{0,{max_calls - 1}}}" if max_calls > 1 else "call"


def _call(parser_name: str, functions: Functions) -> str:
    around = ("", "") if parser_name == "llama3_json" else (f'"{OPEN}\\n" ', f' "\\n{CLOSE}"')
    return f"call: {around[0]}body{around[1]}\n{_bodies(parser_name, functions)}"


def _bodies(parser_name: str, functions: Functions) -> str:
    key = "parameters" if parser_name == "llama3_json" else "arguments"
    names = [f"f{number}" for number in range(len(functions))]
    lines = [f"body: {' | '.join(names)}"]
    for rule, (name, schema) in zip(names, functions, strict=True):
        # Pieces as JSON has them: a longer one would hide those of JSON that begins alike.
        pieces = ["{", '"name"', ": ", f'"{name}"', ", ", f'"{key}"', ": "]
        lines.append(f'{rule}: {" ".join(map(json.dumps, pieces))} {rule}_arguments "}}"')
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        lines.append(f"{rule}_arguments: %json {text}")
    return "\n".join(lines) + "\n"
