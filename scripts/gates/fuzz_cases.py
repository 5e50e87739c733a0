"""Hostile requests, each made from a seed and a number: what `scripts/gates/fuzz.py` sends.

A case takes a good request and spoils it: a field gets a value that it must not or hardly may have, the
JSON is cut, doubled or nested, the head lies. Bodies stay below the server's limit on purpose, but for a
few that do not.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_MODEL_LEN = 256


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request.

    Args:
        method, path, headers, body: as sent.
    """

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None


class Raw(str):
    """A JSON value that json.dumps would not write: as text."""


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_MESSAGES = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny_llama", "prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {"model": "tiny_llama", "messages": _MESSAGES, "max_tokens": 4},
    "/tokenize": {"model": "tiny_llama", "prompt": "hello"},
    "/detokenize": {"model": "tiny_llama", "tokens": [5, 6, 7]},
}
_FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *(
        "top_k",
        "min_p",
        "n",
        "best_of",
        "stream",
        "stream_options",
        "stop",
        "stop_token_ids",
        "seed",
    ),
    *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "logit_bias", "user"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("bad_words", "allowed_token_ids", "response_format", "structured_outputs", "tools"),
    *("tool_choice", "parallel_tool_calls", "functions", "function_call", "priority"),
    *("cache_salt", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "add_special_tokens", "skip_special_tokens", "tokens", "metadata"),
    *("truncate_prompt_tokens", "include_stop_str_in_output", "use_beam_search", "unknown_field"),
    *("return_tokens_as_token_ids", "return_token_ids", "request_id", "reasoning_effort"),
)
_ANYTHING: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 5, 128, 129, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63) - 1),
    *(0.0, 0.5, -0.5, 1e-320, 1e308, Raw("1e400"), Raw("NaN"), Raw("-Infinity"), Raw("1" * 400)),
    *("", " ", "hot", "0", "none", "auto", "\x00", "\u2028", "\U0001f600", Raw('"\\ud800"')),
    *("x" * 3000, "é" * 3000, "<|im_start|>", "{{ 1 }}", "../../etc/passwd", "%s%n", "http://x/"),
    *(
        [],
        [[]],
        [None],
        [True],
        [0],
        [-1],
        [2**40],
        [0.5],
        [""],
        ["a", 1],
        [[1, 2], [3]],
        [[1], "a"],
    ),
    *({}, {"a": 1}, {"type": "text"}, {"type": None}, {"5": 1}, {"5": 101}, {"-1": 1}, {"x": "y"}),
    *(list(range(3, 300)), ["s"] * 50, {str(i): 1 for i in range(600)}),
    *(Raw("[" * 40 + "]" * 40), Raw("[" * 3000 + "]" * 3000), Raw('{"a":' * 900 + "1" + "}" * 900)),
)
_SCHEMAS: tuple[Any, ...] = (
    *({}, {"type": "object"}, {"type": "what"}, {"type": 5}, {"$ref": "#"}, {"$ref": "#/nowhere"}),
    *({"$ref": "http://127.0.0.1:1/x"}, {"$ref": "file:///etc/passwd"}, {"enum": []}, True, False),
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "string", "pattern": "((((a+)+)+)+)$"},
    {"type": "string", "pattern": "("},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    {"enum": [f"value {i}" for i in range(1500)]},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"anyOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(60)]},
    Raw('{"not":' * 60 + "{}" + "}" * 60),
)
_SPECIAL: dict[str, tuple[Any, ...]] = {
    "prompt": (*_ANYTHING, "a" * 2000, [[5, 6], [7]], [511], [512], [2**31], list(range(250))),
    "messages": (
        *([{"role": role, "content": "x"}] for role in ("", "root", "tool", "system", "developer")),
        *([{"role": "user", "content": x}] for x in (None, "", 5, [], [{"type": "image_url"}], {})),
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
        [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f"}}]}],
        [{"content": "x"}],
        *(["x"], [None], [[]], "x", {"role": "user"}, _MESSAGES * 300),
    ),
    "response_format": (
        *({"type": kind} for kind in ("text", "json_object", "json_schema", "grammar", "")),
        *({"type": "json_schema", "json_schema": {"name": "n", "schema": x}} for x in _SCHEMAS),
        {"type": "json_schema", "json_schema": {"name": "n" * 100, "schema": {}, "strict": "x"}},
    ),
    "structured_outputs": (
        *({"json": x} for x in _SCHEMAS),
        *({"regex": x} for x in ("(", "((((a+)+)+)+)$", "a{99999999}", "", "\\p{L}+", "(?=a)", 5)),
        *({"choice": x} for x in ([], [""], ["a", "a"], [1], "ab", ["x" * 900], ["a"] * 3000)),
        *({"grammar": x} for x in ("", "start: start", "root ::= 'a'", 'start: "a"+', "start: %%")),
        {"regex": "a", "choice": ["a"]},
        {"structural_tag": "{}"},
    ),
    "tools": (
        [_TOOL],
        [_TOOL] * 200,
        *([{**_TOOL, "function": {"name": x}}] for x in ("", "a b", "x" * 99, None, 5)),
        *([{**_TOOL, "function": {"name": "f", "parameters": x}}] for x in _SCHEMAS),
    ),
    "tool_choice": ("required", {"type": "function", "function": {"name": "nobody"}}, {}, "any"),
    "stream_options": ({"include_usage": True}, {"include_usage": 5}, {"x": 1}, [], "x"),
    "stop": (["a"] * 5, ["", "a"], "x" * 5000, [None], [["a"]], 5),
    "logit_bias": ({"5": 100}, {"5": -100}, {"5": "x"}, {"99999": 1}, {"5": Raw("NaN")}, [[5, 1]]),
    "chat_template": (
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{%",
    ),
    "chat_template_kwargs": ({"messages": []}, {"x": {"y": [1]}}, {"chat_template": "x"}, 5),
    "tokens": ([], [511], [512], [-1], [2**40], list(range(500)) * 20, [1.5], "5"),
    "max_tokens": (*_ANYTHING, 0, 255, 256, 257, 10**6),
    "n": (0, 1, 2, 16, 128, 129, 10**9, 1.5, "2"),
}


def make_case(seed: int, number: int) -> Case:
    """The case of that number."""
    rng = np.random.default_rng([seed, number])
    kind = _KINDS[rng.choice(len(_KINDS), p=[0.72, 0.12, 0.06, 0.06, 0.04])]
    return kind(rng)


def _spoiled_fields(rng: np.random.Generator) -> Case:
    path, fields = _good(rng)
    for _ in range(rng.choice([1, 1, 2, 3])):
        name = _FIELDS[rng.integers(len(_FIELDS))]
        if rng.random() < 0.4:  # as likely as all others together: what has values of its own
            name = list(_SPECIAL)[rng.integers(len(_SPECIAL))]
        if rng.random() < 0.05:
            fields.pop(name, None)
            continue
        values = _SPECIAL.get(name, _ANYTHING) if rng.random() < 0.7 else _ANYTHING
        fields[name] = values[rng.integers(len(values))]
    if rng.random() < 0.4:
        fields.setdefault("stream", True)
    return Case(method="POST", path=path, body=dump(fields).encode())


def _spoiled_bytes(rng: np.random.Generator) -> Case:
    path, fields = _good(rng)
    data = bytearray(dump(fields).encode())
    how = rng.integers(7)
    if how == 0:
        del data[rng.integers(len(data)) :]
    elif how == 1:
        data[rng.integers(len(data))] = rng.integers(256)
    elif how == 2:
        at = rng.integers(len(data))
        data[at:at] = rng.integers(0, 256, rng.integers(1, 20)).astype(np.uint8).tobytes()
    elif how == 3:
        data = data + data
    elif how == 4:
        data = bytearray(bytes(data).decode().encode("utf-16"))
    elif how == 5:
        data[:0] = b"\xef\xbb\xbf"
    else:
        data = bytearray(rng.integers(0, 256, rng.integers(0, 200)).astype(np.uint8).tobytes())
    return Case(method="POST", path=path, body=bytes(data))


def _other_documents(rng: np.random.Generator) -> Case:
    """JSON that is no object, or a very large or deep one."""
    documents = (
        *("null", "5", '"x"', "[]", "[1, 2]", "true", "{}", "", " ", "{}{}", "NaN", "'x'"),
        *(
            "[" * 100_000,
            '{"a":' * 20_000,
            '{"prompt": "' + "a" * 300_000 + '"}',
            "[" + "0," * 50_000 + "0]",
        ),
        '{"prompt": "a", "prompt": 5, "max_tokens": 2}',
    )
    path = list(GOOD)[rng.integers(len(GOOD))]
    return Case(method="POST", path=path, body=documents[rng.integers(len(documents))].encode())


def _odd_heads(rng: np.random.Generator) -> Case:
    path, fields = _good(rng)
    headers = (
        *({"content-type": x} for x in ("text/plain", "", "application/x-www-form-urlencoded")),
        *({"content-type": x} for x in ("application/json; charset=utf-16", "multipart/form-data")),
        *({"x-request-id": x} for x in ("same", "x" * 5000, "é", "a b", "")),
        *({"authorization": x} for x in ("Bearer", "Bearer x", "Basic eA==", "x" * 4000)),
        *({"host": x} for x in ("evil.example", "", "a/b", "[::1", "127.0.0.1:99999")),
        *({"accept": x} for x in ("image/png", "x" * 4000)),
        *({"content-encoding": x} for x in ("gzip", "br", "identity")),
        *({"transfer-encoding": "identity"}, {"expect": "200-maybe"}, {"origin": "null"}),
        {f"x-{i}": "y" for i in range(60)},
        {"cookie": "z" * 20_000},
    )
    chosen = dict(headers[rng.integers(len(headers))])
    return Case(method="POST", path=path, headers=chosen, body=dump(fields).encode())


def _odd_routes(rng: np.random.Generator) -> Case:
    paths = (
        *("/", "/health", "/metrics", "/version", "/load", "/ping", "/v1/models", "/v1", "/v1/"),
        *("/v1/models/tiny_llama", "/v1/models/nobody", "/v1/models/%2e%2e%2fetc", "//v1/models"),
        *("/v1/models/" + "x" * 3000, "/v1/chat/completions/", "/v1/%00", "/%ff", "/openapi.json"),
        *("/v1/embeddings", "/v1/completions?stream=1", "/v1/completions#x", "/docs", "/.env"),
        *("/../../etc/passwd", "/v1/responses", "/V1/MODELS", "/v1;x=1/models", "/?" + "q" * 3000),
    )
    methods = ("GET", "GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW")
    method = methods[rng.integers(len(methods))]
    body = b"{}" if method in ("POST", "PUT", "PATCH") else None
    return Case(method=method, path=paths[rng.integers(len(paths))], body=body)


_KINDS: tuple[Callable[[np.random.Generator], Case], ...] = (
    _spoiled_fields,
    _spoiled_bytes,
    _other_documents,
    _odd_heads,
    _odd_routes,
)


def _good(rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    paths = list(GOOD)
    path = paths[rng.choice(len(paths), p=[0.4, 0.45, 0.08, 0.07])]
    return path, dict(GOOD[path])


def dump(value: Any) -> str:
    """JSON, with `Raw` texts as they are."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        pairs = (f"{json.dumps(str(name))}: {dump(item)}" for name, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(dump, value)) + "]"
    return json.dumps(value)
