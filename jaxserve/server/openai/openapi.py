"""/openapi.json: this server's own description, OpenAPI 3.1, made of the tables that bodies are read with.

For people and for tools that try servers out. Invariant: a field that is not in a table is not read, and one
that is, is described; so the description cannot drift from what is served.
"""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.server import tokenize
from jaxserve.server.openai import chat, completions
from jaxserve.server.openai.fields import Field
from jaxserve.server.state import ServerState

URL = "/openapi.json"
Schema = dict[str, Any]

# What can go wrong with any request, and with one that has a body.
_ERRORS = {
    "400": "The URL or a header is malformed.",
    "401": "No API key, or a wrong one; only where the server has keys.",
    "403": "The server is not called so (--allowed_hosts).",
    "404": "There is no such URL or model.",
    "405": "The URL takes another method.",
    "431": "URL and headers are too large.",
    "500": "The server failed.",
    "503": "Nothing is served now: loading, shutting down, or the engine is gone.",
}
_BODY_ERRORS = {
    **_ERRORS,
    "400": "The body is no JSON object, or a field is at fault: `param` names it.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not said to be application/json.",
    "429": "The queue is full, or too many bytes are being received; Retry-After says when to come again.",
}
_GENERATE_ERRORS = {
    **_BODY_ERRORS,
    "504": "The request took longer than this server lets one.",
}


def _object(properties: Mapping[str, Any], *optional: str) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_STRING = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_LOGPROB = {"type": "number", "maximum": 0}
_STOP_REASON = {"type": ["string", "integer", "null"]}
_FINISH_REASON = {"enum": ["stop", "length", "tool_calls"]}
_HEAD = {
    "id": _STRING,
    "created": _COUNT,
    "model": _STRING,
    "system_fingerprint": _STRING,
}
_TOP = _object({"token": _STRING, "bytes": _list(_COUNT), "logprob": _LOGPROB})
_TOKEN = _object(
    {
        "token": _STRING,
        "bytes": _or_null(_list(_COUNT)),
        "logprob": _LOGPROB,
        "top_logprobs": _list(_TOP),
    }
)
_CALL = _object(
    {
        "id": _STRING,
        "type": {"const": "function"},
        "function": _object({"name": _STRING, "arguments": _STRING}),
    }
)
_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "refusal": {"type": "null"},
        "tool_calls": _list(_CALL),
    },
    "tool_calls",
)
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _list(_STRING),
        "token_logprobs": _list(_or_null(_LOGPROB)),
        "top_logprobs": _list(
            _or_null({"type": "object", "additionalProperties": _LOGPROB, "minProperties": 1})
        ),
        "text_offset": _list(_COUNT),
    }
)
_COMPLETION_CHOICE = _object(
    {
        "index": _COUNT,
        "text": _STRING,
        "logprobs": _or_null(_COMPLETION_LOGPROBS),
        "finish_reason": _FINISH_REASON,
        "stop_reason": _STOP_REASON,
    }
)
_CHAT_CHOICE = _object(
    {
        "index": _COUNT,
        "message": _MESSAGE,
        "logprobs": _or_null(_object({"content": _list(_TOKEN), "refusal": {"type": "null"}})),
        "finish_reason": _FINISH_REASON,
        "stop_reason": _STOP_REASON,
    }
)
_MODEL = _object(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _STRING,
        "root": _STRING,
        "parent": {"type": "null"},
        "max_model_len": _COUNT,
    }
)
_REPLIES: dict[str, Schema] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _STRING,
                    "type": _STRING,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                }
            )
        }
    ),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        },
        "prompt_tokens_details",
    ),
    "Completion": _object(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": _list(_COMPLETION_CHOICE),
            "usage": _ref("Usage"),
        }
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": _list(_CHAT_CHOICE),
            "usage": _ref("Usage"),
        }
    ),
    "Model": _MODEL,
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _list(_COUNT),
            "token_strs": _or_null(_list(_STRING)),
        }
    ),
    "Text": _object({"prompt": _STRING}),
}


def body_schema(fields: Mapping[str, Field]) -> Schema:
    """What a body may be: an object with these fields; others are ignored."""
    return {
        "type": "object",
        "properties": {name: _property(field) for name, field in fields.items()},
        "required": [name for name, field in fields.items() if field.required],
    }


def _property(field: Field) -> Schema:
    schema = dict(field.schema)
    if schema and schema != {"type": "null"} and not field.required:
        schema = _or_null(schema)
    doc = f"Cannot be given: {field.doc}." if field.use == "refused" else field.doc
    return {**schema, "description": doc}


def _replies(errors: Mapping[str, str], content: Mapping[str, Schema]) -> Schema:
    ok: Schema = {"description": "The answer."}
    if content:
        ok["content"] = {kind: {"schema": schema} for kind, schema in content.items()}
    failed = {
        status: {
            "description": what,
            "content": {"application/json": {"schema": _ref("Error")}},
        }
        for status, what in errors.items()
    }
    return {"200": ok, **failed}


def _get(summary: str, content: Mapping[str, Schema]) -> Schema:
    return {"get": {"summary": summary, "responses": _replies(_ERRORS, content)}}


def _post(
    summary: str, body: str, errors: Mapping[str, str], content: Mapping[str, Schema]
) -> Schema:
    schema = {"application/json": {"schema": _ref(body)}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": schema},
            "responses": _replies(errors, content),
        }
    }


def _paths() -> Schema:
    def generated(reply: str) -> dict[str, Schema]:
        # No schema: in a stream some readers hold it against the body, and some against each event.
        return {"application/json": _ref(reply), "text/event-stream": {}}

    one_model = _get("One name of the model.", {"application/json": _ref("Model")})
    one_model["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _STRING}]
    version = _object({"version": _STRING})
    return {
        completions.URL: _post(
            "Continue prompts.", "CompletionBody", _GENERATE_ERRORS, generated("Completion")
        ),
        chat.URL: _post(
            "Answer a conversation.", "ChatBody", _GENERATE_ERRORS, generated("ChatCompletion")
        ),
        "/v1/models": _get("The model, once per name.", {"application/json": _ref("Models")}),
        "/v1/models/{name}": one_model,
        "/tokenize": _post(
            "A text or a conversation as token ids.",
            "TokenizeBody",
            _BODY_ERRORS,
            {"application/json": _ref("Tokens")},
        ),
        "/detokenize": _post(
            "Token ids as text.",
            "DetokenizeBody",
            _BODY_ERRORS,
            {"application/json": _ref("Text")},
        ),
        "/tokenizer_info": _get(
            "Special tokens by name, and the chat template.",
            {"application/json": {"type": "object"}},
        ),
        "/health": _get("200 where requests are taken.", {}),
        "/version": _get("The version of the server.", {"application/json": version}),
        "/load": _get(
            "How many requests are not answered yet.",
            {"application/json": _object({"server_load": _COUNT})},
        ),
    }


def document(*, vocab_size: int, has_keys: bool) -> Schema:
    """The whole description.

    Args:
        vocab_size: of the model.
        has_keys: whether the server asks for an API key.
    """
    bodies = {
        "CompletionBody": body_schema(completions.FIELDS),
        "ChatBody": body_schema(chat.FIELDS),
        "TokenizeBody": body_schema(tokenize.FIELDS),
        "DetokenizeBody": body_schema(tokenize.DETOKENIZE_FIELDS),
    }
    components: Schema = {"schemas": {**_with_vocab(bodies, vocab_size), **_REPLIES}}
    found: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxserve",
            "version": __version__,
            "description": "OpenAI's API over one model. Unknown fields are ignored, null is absent.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": _paths(),
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
        found["paths"]["/health"]["get"]["security"] = []
    return found


def _with_vocab(schema: Any, vocab_size: int) -> Any:
    """Schemas in which a token id has the model's own limit."""
    if isinstance(schema, list):
        return [_with_vocab(one, vocab_size) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "token-id":
        return {**schema, "maximum": vocab_size - 1}
    return {key: _with_vocab(one, vocab_size) for key, one in schema.items()}


def routes(state: ServerState) -> list[Route]:
    """The routes of this module."""

    async def openapi(request: Request) -> Response:
        _ = state.admission  # 503 until the model is known
        has_keys = bool(state.config.api_key_digests)
        return JSONResponse(document(vocab_size=state.model.vocab_size, has_keys=has_keys))

    return [Route(URL, openapi, methods=["GET"])]
