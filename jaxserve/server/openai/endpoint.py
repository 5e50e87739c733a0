"""`Endpoint`: one body over HTTP, from admission to the last byte. `completions` and `chat` are two of them.

    body -> admit -> parse -> encode (in a thread) -> generate, one request a prompt -> reply

Invariants: a client that leaves ends all of this at once, wherever it stands, and what runs in the engine is
aborted; what fails before the first token has an HTTP status, what fails behind it an error event. Every
stream ends with [DONE].
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from jaxserve.request import RequestOutput, merge_outputs
from jaxserve.sampling_params import MAX_CHOICES
from jaxserve.server.errors import as_api_error, internal_error
from jaxserve.server.openai import sse
from jaxserve.server.openai.call import Call, Reply, Served, failure_of
from jaxserve.server.openai.fields import UnknownFields
from jaxserve.server.openai.merging import merged
from jaxserve.server.request_ids import request_id_of
from jaxserve.server.slow_readers import ClientGoneError
from jaxserve.server.state import ServerState
from jaxserve.server.tools.parser import detect_parser

Parse = Callable[[Mapping[str, Any], Served], Call]
Chunks = Callable[
    [int, RequestOutput], Awaitable[bytes]
]  # (prompt, a part of its output) -> events
_STREAM_HEADERS = (
    (b"content-type", sse.MEDIA_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy in front passes events on as they come
)
# Fields that can be costly to check: bodies with them are understood in a thread, and so are those with a
# list or an object of so many elements.
_COSTLY_FIELDS = ("tools", "response_format", "structured_outputs", "bad_words")
_LONG = 1000
_COSTLY_TOKENS = 2000  # of a reply: more are made JSON in a thread, tool calls are read one by one
_MOST_PARTS = 256  # of a prompt's output before they are joined

logger = logging.getLogger("jaxserve.server")


def tool_parser_of(state: ServerState) -> str | None:
    """The format that the server's model writes tool calls in; None = it has none."""
    name = state.config.tool_call_parser
    if name != "auto":
        return None if name == "none" else name
    tokenizer = state.model.tokenizer
    return None if tokenizer is None else detect_parser(tokenizer.tool_chat_template)


def what_is_served(state: ServerState, unknown: UnknownFields) -> Served:
    """What bodies are understood against, once the model is there."""
    return Served(
        model=state.model,
        check_model=state.check_model,
        tool_parser=tool_parser_of(state),
        shows_cached_tokens=state.config.shows_cached_tokens,
        unknown=unknown,
    )


def count_sequences(body: Mapping[str, Any]) -> int:
    """How many choices a body asks for, before it is checked: what is admitted first."""
    n, prompt = body.get("n"), body.get("prompt")
    has_several = isinstance(prompt, list) and any(isinstance(p, str | list) for p in prompt[:1])
    num_prompts = len(prompt) if has_several else 1  # type: ignore[arg-type]
    if isinstance(n, float) and n.is_integer():  # 3.0 is 3 to JSON, and read as 3
        n = int(n)
    is_count = type(n) is int and 1 <= n <= MAX_CHOICES
    return num_prompts * (n if is_count else 1)  # type: ignore[operator]


class Endpoint:
    """An ASGI application that answers one kind of body.

    Args:
        state: the server's.
        parse: understands a body.
    """

    def __init__(self, state: ServerState, parse: Parse) -> None:
        self._state = state
        self._parse = parse
        self._unknown = UnknownFields()
        self._served: Served | None = None  # made with the first body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive)
        # Held by nobody else: a field that means nothing here may be megabytes, and the reply take long.
        body = [await self._state.body(request)]
        work = asyncio.ensure_future(self._answer(request, body, send))
        left = asyncio.ensure_future(_until_left(receive))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        finally:  # the client left, or the server ends: what runs for the request ends too
            is_done = work.done()
            for task in (work, left):
                task.cancel()
            await asyncio.gather(work, left, return_exceptions=True)
        if not is_done:
            raise ClientGoneError
        work.result()

    async def _answer(
        self, request: HttpRequest, holder: list[dict[str, object]], send: Send
    ) -> None:
        state = self._state
        place = state.admit(request, num_sequences=count_sequences(holder[0]))
        call = await self._understood(holder.pop())
        salt = state.cache_salt(request, call.cache_salt)
        prompts, requests, reply = await state.encoder.run(
            call.prepare, salt, state.sender(request)
        )
        place.count_tokens(sum(map(len, prompts)))
        parts = merged([state.generate(request, one, place) for one in requests])
        async with contextlib.aclosing(parts):
            if call.streaming.stream:
                await _stream(request, self._chunks_of(call, reply), reply.end, parts, send)
                return
            released, num_tokens = await _whole(parts, len(requests), call.check_listed)
            wants_logprobs = call.params.wants_logprobs or call.params.prompt_logprobs is not None
            if wants_logprobs or num_tokens > _COSTLY_TOKENS:
                data = await state.encoder.run(_body_of, reply, released)
            else:
                data = _body_of(reply, released)
            await _send_body(data, send)

    async def _understood(self, body: Mapping[str, Any]) -> Call:
        is_costly = any(body.get(name) is not None for name in _COSTLY_FIELDS)
        if is_costly or any(_is_long(value) for value in body.values()) or len(body) > _LONG:
            return await self._state.encoder.run(self._parse, body, self.served)
        return self._parse(body, self.served)

    def _chunks_of(self, call: Call, reply: Reply) -> Chunks:
        """What makes events; in a thread those that list a prompt's tokens, which may be many."""
        told: set[int] = set()

        async def chunks(prompt: int, output: RequestOutput) -> bytes:
            if output.prompt_logprobs is None or prompt in told:
                return reply.chunks(prompt, output)
            told.add(prompt)
            return await self._state.encoder.run(reply.chunks, prompt, output)

        return chunks

    @property
    def served(self) -> Served:
        """What its bodies are understood against; known once the engine is warm."""
        if self._served is None:
            self._served = what_is_served(self._state, self._unknown)
        return self._served


async def _until_left(receive: Receive) -> None:
    """Returns when the client is gone; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_long(value: object) -> bool:
    return isinstance(value, list | dict) and len(value) > _LONG


async def _whole(
    parts: AsyncGenerator[tuple[int, RequestOutput]],
    num_prompts: int,
    check_listed: Callable[[int], None],
) -> tuple[Sequence[list[RequestOutput]], int]:
    """The output of each prompt, in several parts, and how many tokens they have in all."""
    released: list[list[RequestOutput]] = [[] for _ in range(num_prompts)]
    most = [_MOST_PARTS] * num_prompts
    num_tokens = 0
    async for prompt, output in parts:
        failure = failure_of(output)
        if failure is not None:
            raise failure
        num_tokens += sum(len(one.token_ids) for one in output.outputs)
        check_listed(num_tokens)
        own = released[prompt]
        own.append(output)
        if len(own) > most[prompt]:  # a part a token takes many times the memory of what it holds
            own[:] = [merge_outputs(own)]
            most[prompt] = min(2 * most[prompt], 16 * _MOST_PARTS)
    return released, num_tokens


def _body_of(reply: Reply, released: Sequence[Sequence[RequestOutput]]) -> bytes:
    return sse.encode(reply.body([merge_outputs(parts) for parts in released]))


async def _send_body(data: bytes, send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _stream(
    request: HttpRequest,
    chunks: Chunks,
    end: Callable[[], bytes],
    parts: AsyncGenerator[tuple[int, RequestOutput]],
    send: Send,
) -> None:
    is_begun = False
    try:
        async for prompt, output in parts:
            failure = failure_of(output)
            if failure is not None:
                raise failure
            data = await chunks(prompt, output)
            if not is_begun:
                is_begun = True
                headers = list(_STREAM_HEADERS)
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        data = end()
    except ClientGoneError:
        raise
    except Exception as error:
        if not is_begun:
            raise
        data = _error_event(request, error) + sse.DONE
    await send({"type": "http.response.body", "body": data})


def _error_event(request: HttpRequest, error: Exception) -> bytes:
    known = as_api_error(error)
    if known is None:
        logger.error("request %s failed", request_id_of(request.scope), exc_info=error)
        known = internal_error()
    return sse.event(known.body())
