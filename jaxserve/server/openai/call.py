"""What a body asks for, understood and checked: `Call`; and what answers it: `Reply`.

Made by `completions` and `chat` from a body; carried out by `endpoint` over HTTP and by `batch_file` in
`jaxserve run`, which therefore cannot differ. Nothing here knows of HTTP.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jaxserve import __version__
from jaxserve.async_engine.protocol import ServedModel
from jaxserve.errors import InvalidRequestError, NonFiniteError, RequestError
from jaxserve.field_checks import require
from jaxserve.request import MAX_CACHE_SALT_LENGTH, CacheSalt, Request, RequestOutput
from jaxserve.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.server.openai.fields import UnknownFields, check_type
from jaxserve.server.openai.usage import UsageCounter
from jaxserve.structured_outputs import NAME, TOO_COSTLY

# Tokens that a reply tells of its prompts, the likeliest ones in each place included; or as many as one
# prompt of the whole context has.
MAX_TOLD = 2**20
# Tokens whose log probabilities a whole reply has, the likeliest ones included: some 120 bytes each.
MAX_LISTED = 2**20


@dataclass(frozen=True, kw_only=True)
class Served:
    """What bodies are understood against.

    Args:
        model: what the engine serves.
        check_model: gives the name that a reply carries for a body's `model`, or raises.
        tool_parser: the format of the model's tool calls; None = it has none.
        shows_cached_tokens: whether usage tells the cached prompt tokens.
        unknown: is told of unknown fields.
    """

    model: ServedModel
    check_model: Callable[[object], str]
    tool_parser: str | None
    shows_cached_tokens: bool
    unknown: UnknownFields

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: changes with what may change replies."""
        model = self.model
        parts = (__version__, model.path, model.max_model_len, model.vocab_size, model.num_slots)
        return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:10]}"


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Whether and how a reply is streamed; what OpenAI's `stream_options` say."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "StreamOptions":
        """From the fields of a body.

        Raises:
            InvalidRequestError: options without a stream, or one of them is no boolean.
        """
        stream, options = fields.get("stream", False), fields.get("stream_options")
        if options is None:
            return cls(stream=stream)
        if not stream:
            raise InvalidRequestError(
                "stream_options can only be given with stream: true", param="stream_options"
            )
        given = {name: value for name, value in options.items() if value is not None}
        for name in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            if name in given:
                check_type(f"stream_options.{name}", given[name], {"type": "boolean"})
        continuous = given.get("continuous_usage_stats", False)
        # As in vLLM, the continuous figures are a kind of included ones.
        return cls(
            stream=stream,
            include_usage=given.get("include_usage", False),
            continuous_usage_stats=continuous and given.get("include_usage", False),
        )


class Reply(Protocol):
    """Makes the answer of one call from what the engine releases."""

    def chunks(self, prompt: int, output: RequestOutput) -> bytes:
        """The events of a part of a prompt's output."""
        ...

    def end(self) -> bytes:
        """The events behind the last part, [DONE] included."""
        ...

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer that is not streamed.

        Args:
            outputs: the whole output of each prompt.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Call:
    """A body that was understood.

    Args:
        id: of the reply.
        created: when, in seconds of the epoch.
        model: the name that the reply carries.
        served: what it was understood against.
        params: how each of its prompts is decoded.
        streaming: whether and how the reply is streamed.
        priority: as in `Request`.
        cache_salt: the body's own.
        return_token_ids, tokens_as_ids: as the fields of the body.
        num_logprobs: likeliest tokens that the reply tells per token; None = no log probabilities.
    """

    id: str
    created: int
    model: str
    served: Served
    params: SamplingParams
    streaming: StreamOptions
    priority: int
    cache_salt: str | None
    return_token_ids: bool
    tokens_as_ids: bool
    num_logprobs: int | None

    @property
    def num_prompts(self) -> int:
        """How many prompts there are."""
        return 1

    @property
    def num_sequences(self) -> int:
        """Choices of all prompts."""
        return self.num_prompts * self.params.n

    def encode(self) -> list[list[int]]:
        """The prompts as token ids; takes time, and runs in a thread.

        Raises:
            InvalidRequestError: a prompt is at fault.
        """
        raise NotImplementedError

    def reply(self, prompts: Sequence[Sequence[int]]) -> Reply:
        """What makes the answer.

        Args:
            prompts: of `encode`.
        """
        raise NotImplementedError

    def requests(
        self,
        prompts: Sequence[Sequence[int]],
        cache_salt: CacheSalt | str | None,
        sender: str = "",
    ) -> list[Request]:
        """What to ask of the engine, a request a prompt.

        Args:
            prompts: of `encode`.
            cache_salt: what separates their cached pages from others.
            sender: as in `Request`.

        Raises:
            InvalidRequestError: a field is at fault.
        """
        return [
            Request(
                id=f"{self.id}-{number}",
                prompt_token_ids=prompt,
                sampling_params=self.params,
                priority=self.priority,
                cache_salt=cache_salt,
                sender=sender,
            )
            for number, prompt in enumerate(prompts)
        ]

    def prepare(self, cache_salt: CacheSalt | str | None, sender: str = "") -> "PreparedCall":
        """All that is needed to carry it out; takes time, and runs in a thread.

        What the engine would refuse is refused here, before it is sent: its time is everybody's.

        Args:
            cache_salt, sender: as in `requests`.

        Raises:
            InvalidRequestError: a prompt or a field is at fault.
        """
        prompts = self.encode()
        requests = self.requests(prompts, cache_salt, sender)
        for request, prompt in zip(requests, prompts, strict=True):
            self.served.model.limits.output_budget(request, prompt)
        self._check_told(sum(map(len, prompts)))
        return PreparedCall(prompts, requests, self.reply(prompts))

    def _check_told(self, num_prompt_tokens: int) -> None:
        """Bounds how often a reply tells of its prompts: each choice may, with the likeliest tokens."""
        params = self.params
        num_told = num_prompt_tokens * params.n * self.tells_of_prompt
        if params.prompt_logprobs is not None:
            num_told = num_prompt_tokens * params.n * (params.prompt_logprobs + 1)
        most = max(MAX_TOLD, self.served.model.max_model_len * (MAX_LOGPROBS + 1))
        if num_told > most:
            raise InvalidRequestError(
                "what choices tell of their prompts (echo, prompt_logprobs, return_token_ids) must be at "
                f"most {most} tokens in all, likeliest ones included, got {num_told}: ask for fewer "
                "choices, prompts or logprobs",
                param="n",
            )

    def check_listed(self, num_tokens: int) -> None:
        """Bounds the log probabilities of a reply that is made as a whole, while it grows.

        Args:
            num_tokens: that its choices have so far.

        Raises:
            InvalidRequestError: they are too many.
        """
        num_listed = num_tokens * (self.params.num_top_logprobs + 1) * self.params.wants_logprobs
        if num_listed > MAX_LISTED:
            raise InvalidRequestError(
                f"the log probabilities of a reply that is not streamed must be of at most {MAX_LISTED} "
                "tokens in all, likeliest ones included: stream it, or ask for fewer tokens, choices or "
                "logprobs",
                param="logprobs",
                code="reply_too_large",
            )

    @property
    def tells_of_prompt(self) -> bool:
        """Whether each choice tells its prompt's tokens or text."""
        return self.return_token_ids

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that begin every object of the reply.

        Args:
            kind: its `object`.
        """
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.served.fingerprint,
        }

    def usage_counter(self) -> UsageCounter:
        """A fresh count of its tokens."""
        return UsageCounter(shows_cached=self.served.shows_cached_tokens)


class PreparedCall(NamedTuple):
    """A call that can be carried out.

    Args:
        prompts: of `Call.encode`.
        requests: what to ask of the engine, a request a prompt.
        reply: makes the answer.
    """

    prompts: list[list[int]]
    requests: list[Request]
    reply: Reply


def common_fields(fields: Mapping[str, Any], served: Served, prefix: str) -> dict[str, Any]:
    """The arguments of a `Call` that all endpoints take from a body alike.

    Args:
        fields: of `fields.read_fields`.
        served: what it is understood against.
        prefix: of the reply's id.
    """
    salt = fields.get("cache_salt")
    if salt is not None:
        limit = f"a text of 1 to {MAX_CACHE_SALT_LENGTH} characters"
        require(0 < len(salt) <= MAX_CACHE_SALT_LENGTH, "cache_salt", salt, limit)
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "created": int(time.time()),
        "model": served.check_model(fields.get("model")),
        "served": served,
        "streaming": StreamOptions.from_fields(fields),
        "priority": fields.get("priority", 0),
        "cache_salt": salt,
        "return_token_ids": fields.get("return_token_ids", False),
        "tokens_as_ids": fields.get("return_tokens_as_token_ids", False),
    }


def failure_of(output: RequestOutput) -> RequestError | None:
    """Why an output, or a part of one, is no answer; None when it is one."""
    for one in output.outputs:
        if one.finish_reason == "error":
            what = str(one.stop_reason or "error")
            if what == "non_finite_logits":
                message = "the model computed NaN or infinite values"
                return NonFiniteError(f"choice {one.index}: {message}", code=what)
            if what == TOO_COSTLY:
                message = (
                    f"choice {one.index}: {NAME} cost too much to go on with: what they describe is too "
                    "large (fewer or smaller repetitions, options or properties help)"
                )
                return InvalidRequestError(message, param=NAME, code=what)
            # What was asked for leads to where nothing is allowed, or costs too much to go on with.
            message = (
                f"choice {one.index}: nothing can follow what the model has said so far ({what})"
            )
            return InvalidRequestError(message, param=what, code="constraint_failed")
        if one.finish_reason == "abort":
            return RequestError("the request was aborted before it was done", code="aborted")
    return None
