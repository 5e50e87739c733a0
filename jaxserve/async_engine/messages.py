"""Commands and events as bytes: msgpack with strict types. Used by `pipes`, on both sides.

    message = kind (one byte, its place in KINDS) + msgpack of that kind's type

What is read is checked as it is read, against types that stand here: there is no way to name another
type, and nothing in a message is run. The params of a request go as the fields that differ from their
defaults, and are made, and checked, by their own class.

Invariant: what is decoded equals what was encoded, or encoding raises.
"""

from dataclasses import fields
from typing import Any

import msgspec

from jaxserve.async_engine.commands import (
    AbortRequest,
    AddRequest,
    Answer,
    Command,
    Ended,
    Event,
    NotStarted,
    Query,
    Refused,
    Released,
    Started,
    Stop,
)
from jaxserve.async_engine.protocol import ServedModel
from jaxserve.errors import InvalidRequestError
from jaxserve.request import CacheSalt, Request
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.structured_outputs import StructuredOutputs
from jaxserve.text.tokenizer import Tokenizer, TokenizerTexts

MAX_INT = 2**63 - 1  # a budget beyond it is clamped, as the engine would
_CLAMPED = ("max_tokens", "min_tokens")
_REALS = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "length_penalty"),
)
_DEFAULTS = {SamplingParams: SamplingParams(), BeamParams: BeamParams(beam_width=1)}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message to an engine's process: what `LLM` takes, and where its log goes."""

    model: str
    generation_config: str
    options: dict[str, Any]
    log_level: int


class RequestMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A `Request`; of `sampling` and `beam` the one that is given."""

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: dict[str, Any] | None
    beam: dict[str, Any] | None
    priority: int
    cache_salt: CacheSalt | None
    prompt_logprobs_start: int
    sender: str


class StartedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `Started`: the model's figures, its tokenizer as texts."""

    path: str
    max_model_len: int
    vocab_size: int
    num_slots: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    default_sampling_params: dict[str, Any]
    tokenizer: TokenizerTexts | None

    def to_model(self) -> ServedModel:
        """Makes the tokenizer, which may take a second."""
        tokenizer = None if self.tokenizer is None else Tokenizer.from_texts(self.tokenizer)
        params = SamplingParams(**self.default_sampling_params)
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        given |= {"default_sampling_params": params, "tokenizer": tokenizer}
        return ServedModel(**given)


# Kinds may be added at the end only as long as both sides are of one version, which they are: the number
# of a kind means nothing outside of a run.
KINDS: tuple[Any, ...] = (
    Settings,
    RequestMessage,
    AbortRequest,
    Query,
    Stop,
    StartedMessage,
    NotStarted,
    Released,
    Refused,
    Answer,
    Ended,
)
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_DECODERS = [msgspec.msgpack.Decoder(kind, strict=True) for kind in KINDS]
_ENCODER = msgspec.msgpack.Encoder()

Message = Settings | Command | Event | StartedMessage


def encode(message: Message) -> bytes:
    """A message as bytes.

    Raises:
        InvalidRequestError: a request holds something that has no bytes.
    """
    if isinstance(message, AddRequest):
        return _encode_request(message.request)
    if isinstance(message, Started):
        message = _started_message(message.model)
    return _with_kind(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message of these bytes; of a request that its own classes do not take, its refusal.

    Raises:
        msgspec.DecodeError: they are none.
    """
    number = data[0] if len(data) else len(KINDS)
    if number >= len(KINDS):
        raise msgspec.DecodeError(f"no kind of message has the number {number}")
    message = _DECODERS[number].decode(memoryview(data)[1:])
    if not isinstance(message, RequestMessage):
        return message
    try:
        return AddRequest(_request(message))
    except InvalidRequestError as error:
        return Refused(message.id, error.message, error.param, error.code, True)


def _with_kind(message: object) -> bytes:
    return bytes((_NUMBERS[type(message)],)) + _ENCODER.encode(message)


def _encode_request(request: Request) -> bytes:
    beam = request.beam
    try:
        return _with_kind(
            RequestMessage(
                id=request.id,
                prompt_token_ids=tuple(request.prompt_token_ids),
                sampling=_given(request.sampling_params) if beam is None else None,
                beam=None if beam is None else _given(beam),
                priority=request.priority,
                cache_salt=request.cache_salt,  # type: ignore[arg-type] - tagged by Request
                prompt_logprobs_start=min(request.prompt_logprobs_start, MAX_INT),
                sender=request.sender,
            )
        )
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequestError(
            f"the request cannot be sent to the engine's process: {error}"
        ) from error


def _request(message: RequestMessage) -> Request:
    params: dict[str, Any] = {}
    if message.beam is not None:
        params["beam"] = BeamParams(**message.beam)
    else:
        params["sampling_params"] = SamplingParams(**(message.sampling or {}))
    return Request(
        id=message.id,
        prompt_token_ids=message.prompt_token_ids,
        priority=message.priority,
        cache_salt=message.cache_salt,
        prompt_logprobs_start=message.prompt_logprobs_start,
        sender=message.sender,
        **params,
    )


def _given(params: SamplingParams | BeamParams) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    defaults = _DEFAULTS[type(params)]
    found = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if value is getattr(defaults, field.name):
            continue
        if field.name in _REALS:
            value = float(value)
        elif field.name in _CLAMPED and value is not None:
            value = min(value, MAX_INT)
        elif isinstance(value, StructuredOutputs):
            value = {value.kind: getattr(value, value.kind)}
        found[field.name] = value
    if isinstance(params, BeamParams):
        found["beam_width"] = params.beam_width
    return found


def _started_message(model: ServedModel) -> StartedMessage:
    return StartedMessage(
        path=model.path,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        num_slots=model.num_slots,
        max_num_seqs=model.max_num_seqs,
        eos_token_ids=model.eos_token_ids,
        default_sampling_params=_given(model.default_sampling_params),
        tokenizer=None if model.tokenizer is None else model.tokenizer.to_texts(),
    )
