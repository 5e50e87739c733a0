"""OpenAI batch files: a line is a body with its URL, its result the reply to it. Used by `jaxserve run`.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"index": 0, "id", "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error": null}

Bodies are understood, and replies made, by what answers them over HTTP. A line without a result has response
null and an error {message, type, param, code}, whatever went wrong. Invariant: a result depends on the
line, its place and the model alone: ids are made of the first two, and `created` is 0.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError, RequestError, shown
from jaxserve.field_checks import require
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.seeds import derive_seed
from jaxserve.server.openai import chat, completions
from jaxserve.server.openai.call import Call, Served

_PARSERS = {completions.URL: completions.parse, chat.URL: chat.parse}
MAX_CUSTOM_ID_LENGTH = 512
MAX_MESSAGE_LENGTH = 1000  # characters of an error's message; a bad value may be megabytes


def read_custom_id(fields: Mapping[str, Any]) -> str:
    """The id that a line's result carries.

    Raises:
        InvalidRequestError: there is none, or it is no text.
    """
    found = fields.get("custom_id")
    if found is None:
        raise InvalidRequestError("custom_id is missing", param="custom_id")
    fits = isinstance(found, str) and 0 < len(found) <= MAX_CUSTOM_ID_LENGTH
    require(fits, "custom_id", found, f"a text of 1 to {MAX_CUSTOM_ID_LENGTH} characters")
    return found


def check_name(name: object, names: Sequence[str]) -> str:
    """The name that a reply carries, for what a body calls `model`; None = it named none.

    Raises:
        InvalidRequestError: no such model.
    """
    if name is None:
        return names[0]
    require(isinstance(name, str), "model", name, "a string")
    if name not in names:
        raise InvalidRequestError(
            f"the model {shown(name)} is not the one of this run, which is called {names[0]!r}",
            param="model",
            code="model_not_found",
        )
    return str(name)


def read_call(
    fields: Mapping[str, Any], served: Served, *, index: int, defaults: Mapping[str, Any]
) -> Call:
    """What a line asks for.

    Args:
        fields: of the line.
        served: what bodies are understood against.
        index: of the line.
        defaults: fields of bodies for those that do not set them.

    Raises:
        InvalidRequestError: the line, or its body, is at fault.
    """
    method, url, body = fields.get("method"), fields.get("url"), fields.get("body")
    require(method == "POST", "method", method, '"POST"')
    is_known = isinstance(url, str) and url in _PARSERS
    require(is_known, "url", url, f"one of {', '.join(_PARSERS)}")
    require(isinstance(body, Mapping), "body", body, "an object")
    assert isinstance(body, Mapping)
    streams = body.get("stream") not in (None, False)
    require(not streams, "stream", body.get("stream"), "false in a batch file")
    given = {name: value for name, value in body.items() if value is not None}
    more = defaults if url == chat.URL else {k: v for k, v in defaults.items() if k != "tools"}
    call = _PARSERS[str(url)]({**more, **given}, served)
    prefix = call.id.partition("-")[0]
    name = line_name(index, read_custom_id(fields))
    return dataclasses.replace(call, id=f"{prefix}-{name}", created=0)


def line_name(index: int, custom_id: str | None) -> str:
    """What ids are made of: the same for the same line in each run."""
    return hashlib.sha256(f"{index}:{custom_id}".encode("utf-8", "replace")).hexdigest()[:24]


def seeded(params: SamplingParams, *, seed: int, index: int, prompt: int) -> SamplingParams:
    """Params that always have a seed, by the line's place, so that order and --resume change nothing.

    Args:
        params: of a line.
        seed: the run's.
        index: of the line.
        prompt: the number of the prompt in it.
    """
    if params.seed is not None:
        return params
    own = derive_seed(seed, index)
    if prompt:  # prompts of one line differ in their draws, as choices do
        own = derive_seed(own, prompt)
    return dataclasses.replace(params, seed=own)


def result(
    call: Call,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[RequestOutput],
    *,
    index: int,
    custom_id: str,
) -> dict[str, Any]:
    """The result of a line.

    Args:
        call: what it asked for.
        prompts: its prompts.
        outputs: the whole output of each.
        index, custom_id: of the line.
    """
    name = line_name(index, custom_id)
    body = call.reply(prompts).body(outputs)
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return _line(index, custom_id, response=response, error=None)


def failure(error: RequestError, *, index: int, custom_id: str | None) -> dict[str, Any]:
    """The result of a line that has none; its message begins with the line's number, from 1."""
    body = error.to_dict()
    body["message"] = f"line {index + 1}: {error.message}"[:MAX_MESSAGE_LENGTH]
    return _line(index, custom_id, response=None, error=body)


def _line(
    index: int,
    custom_id: str | None,
    *,
    response: Mapping[str, Any] | None,
    error: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        "index": index,
        "id": f"batch_req_{line_name(index, custom_id)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
