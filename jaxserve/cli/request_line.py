"""One input line of `run` or `bench` -> what to ask of the engine, or why that cannot be done.

A line is a JSON object with `prompt` (text or token ids) or `messages`, an optional `id`, `priority`,
`cache_salt` and `tools`, and any field of `SamplingParams`; or, with --input_format=text, the prompt
itself. Every line gets an answer of its own: nothing that a line holds raises out of `parse`.
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from jaxserve.cli.run_input import MAX_LINE_BYTES
from jaxserve.cli.sampling_flags import REQUEST_FIELDS, SAMPLING_FIELDS
from jaxserve.errors import MAX_SHOWN_LENGTH, InvalidRequestError
from jaxserve.field_names import closest
from jaxserve.request import SamplingParams
from jaxserve.sampling_params import BeamParams
from jaxserve.seeds import derive_seed

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
KNOWN_FIELDS = ("id", *PROMPT_FIELDS, *REQUEST_FIELDS, *SAMPLING_FIELDS)
# Fields of beam search, here and by the names that other engines have for them.
BEAM_FIELDS = {field.name for field in dataclasses.fields(BeamParams)} - set(KNOWN_FIELDS)
BEAM_FIELDS |= {"use_beam_search", "num_beams", "best_of"}
TEXT_FIELDS = ("stop", "bad_words", "structured_outputs")  # sampling fields that hold texts

logger = logging.getLogger("jaxserve.cli")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLine:
    """A line that was understood, or not: then `error` says why and the fields behind it are empty.

    Args:
        index: of the line, from 0.
        id: the line's own, or None.
        error: why it cannot be run.
        prompt: text or token ids.
        messages: a conversation, instead of a prompt.
        tools: functions that the chat template tells the model of; only with messages.
        params: how to decode; always with a seed.
        priority, cache_salt: as in `Request`, which checks them.
    """

    index: int
    id: str | int | None = None
    error: InvalidRequestError | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, object]] | None = None
    tools: list[dict[str, object]] | None = None
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: str | None = None


class LineParser:
    """Parses the lines of one run, in order: it remembers the ids it has seen.

    Args:
        sampling: fields of `SamplingParams` for what a line does not set.
        seed: the run's seed.
        request: priority, cache_salt and tools for what a line does not set; tools reach only lines
            with messages.
        is_text: a line is a prompt, not JSON.
        is_chat: a text line is what a user says, to be answered through the chat template.
    """

    def __init__(
        self,
        sampling: Mapping[str, object],
        *,
        seed: int,
        request: Mapping[str, object] | None = None,
        is_text: bool = False,
        is_chat: bool = False,
    ):
        self._sampling = dict(sampling)
        self._seed = seed
        self._request = dict(request or {})
        self._is_text = is_text
        self._is_chat = is_chat
        self._seen_ids: dict[str | int, int] = {}
        self._warned: set[str] = set()

    def parse(self, index: int, data: bytes) -> RequestLine:
        """Reads one line; a line that is at fault comes back with its `error`."""
        line_id = None
        try:
            fields = self._fields(data)
            line_id = _id(fields)
            self._refuse_second(line_id, index)
            self._warn_unknown(fields, index)
            return RequestLine(
                index=index,
                id=line_id,
                params=self._params(fields, index),
                **self._request_fields(fields),
                **_prompt(fields),
            )
        except InvalidRequestError as error:
            return RequestLine(index=index, id=line_id, error=error)
        except (RecursionError, OverflowError) as caught:
            is_deep = isinstance(caught, RecursionError)
            what = "nested too deeply" if is_deep else "holds a number that is out of range"
            error = InvalidRequestError(what, code="invalid_json")
            return RequestLine(index=index, id=line_id, error=error)

    def _fields(self, data: bytes) -> dict[str, Any]:
        if not self._is_text:
            return json_fields(data)
        text = _decoded(data, "prompt")
        if not text:
            raise InvalidRequestError("the prompt is empty", param="prompt", code="blank_line")
        if self._is_chat:
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}

    def _refuse_second(self, line_id: str | int | None, index: int) -> None:
        if line_id is None:
            return
        first = self._seen_ids.setdefault(line_id, index)
        if first != index:
            raise InvalidRequestError(
                f"id {line_id!r} was used before, on line {first + 1}",
                param="id",
                code="duplicate_id",
            )

    def _warn_unknown(self, fields: Mapping[str, object], index: int) -> None:
        """Says once per name that a field means nothing here; a line is not lost for it."""
        for name in fields.keys() - set(KNOWN_FIELDS) - self._warned:
            self._warned.add(name)
            hint = _hint(name)
            logger.warning(
                "line %d: unknown field %r is ignored%s; said once for all lines",
                index + 1,
                name[:100],
                hint,
            )

    def _request_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: fields[name] for name in REQUEST_FIELDS if fields.get(name) is not None}
        found = {**self._request, **own}
        if fields.get("messages") is None:
            if own.get("tools"):
                raise InvalidRequestError("tools need messages, got a prompt", param="tools")
            found.pop("tools", None)
        _require_unicode("tools", found.get("tools"))
        return found

    def _params(self, fields: Mapping[str, Any], index: int) -> SamplingParams:
        own = {name: fields[name] for name in SAMPLING_FIELDS if fields.get(name) is not None}
        for name in TEXT_FIELDS:
            _require_unicode(name, own.get(name))
        params = SamplingParams(**{**self._sampling, **own})
        if params.seed is None:  # by the line's index, so that order and --resume change nothing
            params = dataclasses.replace(params, seed=derive_seed(self._seed, index))
        return params


def _hint(name: str) -> str:
    """What may have been meant by a field that is none, in brackets; empty when nothing is near."""
    if name in BEAM_FIELDS:
        return " (a line is not decoded by beam search: LLM.beam_search does that, in Python)"
    near = closest(name, KNOWN_FIELDS)
    return f" (did you mean {near!r}?)" if near else ""


def _decoded(data: bytes, what: str) -> str:
    if len(data) > MAX_LINE_BYTES:
        raise InvalidRequestError(
            f"the {what} is longer than {MAX_LINE_BYTES} bytes", code="line_too_long"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"the {what} is not UTF-8: {error.reason} at byte {error.start}",
            code="invalid_utf8",
        ) from None


def json_fields(data: bytes) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        InvalidRequestError: it is too long, blank, no UTF-8, no JSON or no object.
    """
    text = _decoded(data, "line")
    if not text.strip():
        raise InvalidRequestError("the line is blank", param="prompt", code="blank_line")
    try:
        return _json_object(text)
    except (RecursionError, OverflowError) as caught:
        is_deep = isinstance(caught, RecursionError)
        what = "nested too deeply" if is_deep else "holds a number that is out of range"
        raise InvalidRequestError(what, code="invalid_json") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            # Some of these texts end in "at" themselves.
            f"not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}",
            code="invalid_json",
        ) from None
    except ValueError:  # the only other thing that Python refuses
        limit = sys.get_int_max_str_digits()
        raise InvalidRequestError(
            f"not valid JSON: it holds an integer of more than {limit} digits", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"must be a JSON object, got {_kind(value)}", code="not_an_object"
        )
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _id(fields: Mapping[str, object]) -> str | int | None:
    value = fields.get("id")
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
        raise InvalidRequestError(
            f"id must be a string or an integer, got {_kind(value)}", param="id"
        )
    return value  # type: ignore[return-value]


def _prompt(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt or the messages, checked as far as that goes without a tokenizer.

    Token ids given beside their text win: a workload file holds both, and ids leave nothing to chance.
    """
    given = [name for name in PROMPT_FIELDS if fields.get(name) is not None]
    if not given:
        raise InvalidRequestError("a prompt or messages is needed", param="prompt")
    if "messages" in given:
        if len(given) > 1:
            raise InvalidRequestError(
                f"messages and {given[0]} exclude each other", param="messages"
            )
        return {"messages": _messages(fields["messages"])}
    name = given[-1]
    value = fields[name]
    if isinstance(value, str) and name == "prompt":
        _require_unicode(name, value)
        return {"prompt": value}
    if not isinstance(value, list):
        wanted = "text or a list of token ids" if name == "prompt" else "a list of token ids"
        raise InvalidRequestError(f"{name} must be {wanted}, got {_kind(value)}", param=name)
    for position, item in enumerate(value):
        if type(item) is not int:
            raise InvalidRequestError(
                f"{name}[{position}] must be a token id (an integer), got {_as_json(item)}",
                param=name,
            )
    return {"prompt": value}


def _as_json(value: object) -> str:
    """A value as the line has it, cut where it would drown the message."""
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}..."


def _messages(value: object) -> list[dict[str, object]]:
    if not isinstance(value, list) or not value:
        kind = "an empty array" if value == [] else _kind(value)
        raise InvalidRequestError(
            f"messages must be a list of at least one message, got {kind}", param="messages"
        )
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise InvalidRequestError(
                f"messages[{number}] must be an object, got {_kind(message)}", param="messages"
            )
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"messages[{number}].role must be a string, got {_kind(message.get('role'))}",
                param="messages",
            )
    _require_unicode("messages", value)
    return value


def _require_unicode(name: str, value: object) -> None:
    """Half a surrogate pair can be written in JSON, but it is no character and no tokenizer takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} holds half of a surrogate pair ({error.object[error.start]!r})", param=name
        ) from None
