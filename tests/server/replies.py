"""Reading replies as a strict client does: events by their bytes, objects by OpenAI's own schemas."""

import functools
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema

SCHEMAS = Path(__file__).parent / "data" / "openai_schemas.json"


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    components = _with_null(json.loads(SCHEMAS.read_text("utf-8"))["components"])
    root = {"$ref": f"#/components/schemas/{name}", "components": components}
    return jsonschema.Draft202012Validator(root)


def _with_null(schema: Any) -> Any:
    """`nullable`, a word of OpenAPI 3.0 that the description still uses, in the words of 3.1."""
    if isinstance(schema, list):
        return [_with_null(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _with_null(one) for key, one in schema.items() if key != "nullable"}
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True else found


def check_schema(name: str, value: object) -> None:
    """Fails where a value is not what OpenAI's description says it is."""
    _validator(name).validate(value)


def strict_json(data: bytes | str) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(data, parse_constant=refuse)


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream, whose form is checked byte by byte; [DONE] is there and left out."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream"
    return events_in(reply.content)


def events_in(data: bytes) -> list[dict[str, Any]]:
    """As `events_of`, from the bytes."""
    assert data.endswith(b"\n\n")
    blocks = data.decode("utf-8").removesuffix("\n\n").split("\n\n")
    # Not only newlines end a line for every reader.
    assert all(len(block.splitlines()) == 1 and block.startswith("data: ") for block in blocks)
    *objects, last = (block.removeprefix("data: ") for block in blocks)
    assert last == "[DONE]"
    return [strict_json(one) for one in objects]


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """The error object of a failed request."""
    body = strict_json(reply.content)
    check_schema("ErrorResponse", body)
    return body["error"]


def joined_completion(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A stream's choices, joined to those of a reply that is not streamed."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {**part, "text": "", "logprobs": None})
            assert whole["finish_reason"] is None or whole["finish_reason"] == part["finish_reason"]
            whole["text"] += part["text"]
            whole["logprobs"] = _joined_lists(whole["logprobs"], part["logprobs"])
            if "token_ids" in part and whole is not part:
                whole.setdefault("all_ids", []).extend(part["token_ids"])
            whole |= {k: part[k] for k in ("finish_reason", "stop_reason") if k in part}
    for whole in choices.values():
        if "all_ids" in whole:
            whole["token_ids"] = whole.pop("all_ids")
    return [choices[index] for index in sorted(choices)]


def _joined_lists(whole: dict | None, part: dict | None) -> dict | None:
    if whole is None or part is None:
        return whole or part
    return {name: whole[name] + part[name] for name in whole}


def joined_chat(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat stream's choices, joined by a client's rules to {message, logprobs, finish_reason ...}."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            is_first = part["index"] not in choices
            assert ("role" in part["delta"]) == is_first, "the role stands in the first chunk alone"
            whole = choices.setdefault(part["index"], {"message": {"content": None}, "entries": []})
            assert whole.get("finish_reason") is None, "nothing comes behind the finish_reason"
            _join_delta(whole["message"], part["delta"])
            whole["entries"] += (part["logprobs"] or {}).get("content", [])
            whole |= {k: part[k] for k in ("finish_reason", "stop_reason") if k in part}
    return [choices[index] for index in sorted(choices)]


def _join_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta.get("content"):
        message["content"] = (message["content"] or "") + delta["content"]
    for part in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
        else:
            assert "id" not in part
            assert "name" not in part["function"]
        calls[part["index"]]["arguments"] += part["function"]["arguments"]
