"""Sends one request of a load to an OpenAI-compatible server and notes when each part of the answer comes.

Used by `run_load.py`, `jaxserve bench serve` and `scripts/gates`. Invariant: `send` always comes back within
the time limit and never raises for what a server or a network did: that is the record's `failure`, and a
request with a failure has no latency.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import JaxserveError
from jaxserve.server.load.http_client import Address, HttpClient, HttpError, Response
from jaxserve.server.load.records import LoadRequest, RequestRecord
from jaxserve.server.load.sse import EventError, EventParser

# What is spoken -> the route that takes it.
ROUTES = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_MAX_DETAIL_LENGTH = 300


class ServerError(JaxserveError):
    """A server that cannot be measured: nothing answers, or not as expected."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Whom to measure.

    Args:
        base_url: as http://HOST:PORT.
        backend: "openai" for completions, "openai-chat" for chat completions.
        model: the name to ask for; None: the first that the server lists.
        api_key: sent as a bearer token, or None.
        request_timeout_s: no request takes longer.
        extra_body: fields for every request; they stand above those of the dataset.
        cache_salt: sent with every request, before the one that it has itself; None: only that.
    """

    base_url: str
    backend: str = "openai"
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    request_timeout_s: float = 600.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str | None = None


class LoadClient:
    """Talks to the server of a `Target`.

    Args:
        target: whom.
        clock: seconds, never going back.
    """

    def __init__(self, target: Target, *, clock: Callable[[], float] = time.perf_counter):
        self.target = target
        self._clock = clock
        headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        self.http = HttpClient(Address.parse(target.base_url), headers=headers)
        self.model = target.model

    async def find_model(self) -> str:
        """The name of the model that is asked for.

        Raises:
            ServerError: the server does not list one.
        """
        if self.model is None:
            listed = await self.get_json("GET", "/v1/models")
            try:
                self.model = str(listed["data"][0]["id"])
            except (LookupError, TypeError):
                raise ServerError("/v1/models lists no model; name one with --model") from None
        return self.model

    async def get_json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer of a route that is no part of the load.

        Raises:
            ServerError: there is none, with status 200 and in JSON, within the time limit.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            async with (
                asyncio.timeout(self.target.request_timeout_s),
                self.http.request(method, path, body=data) as response,
            ):
                answer = await response.read()
        except HttpError as error:
            raise ServerError(f"{path}: {error}") from None
        except TimeoutError:
            limit = self.target.request_timeout_s
            raise ServerError(f"{path}: no answer within {limit:g} s") from None
        if response.status != 200:
            raise ServerError(f"{path}: status {response.status}: {_error_text(answer)}")
        try:
            return json.loads(answer)
        except ValueError:
            raise ServerError(f"{path}: the answer is no JSON: {answer[:60]!r}") from None

    async def send(
        self, request: LoadRequest, record: RequestRecord, *, begin_s: float = 0.0
    ) -> None:
        """Sends a request and fills its record; does not raise for what the server does.

        Args:
            request: what to ask.
            record: where what happens is noted.
            begin_s: of the load, on the client's clock.
        """
        data = json.dumps(self._body(request)).encode()
        path = ROUTES[self.target.backend]
        record.num_prompt_tokens = request.num_prompt_tokens or 0
        answer = _Answer(record, lambda: self._clock() - begin_s)
        record.sent_s = self._clock() - begin_s
        try:
            async with (
                asyncio.timeout(self.target.request_timeout_s),
                self.http.request("POST", path, body=data) as response,
            ):
                await answer.take(response)
        except HttpError as error:
            _fail(record, error.kind, str(error))
        except TimeoutError:
            limit = self.target.request_timeout_s
            _fail(record, "timeout", f"not done within {limit:g} s")

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        body = {
            **request.body,
            **self.target.extra_body,
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.target.cache_salt:
            own = body.get("cache_salt")
            body["cache_salt"] = (
                f"{self.target.cache_salt}/{own}" if own else self.target.cache_salt
            )
        return body

    async def close(self) -> None:
        """Closes the connections that are left."""
        await self.http.close()


class _Answer:
    """Reads the answer to one request into its record."""

    def __init__(self, record: RequestRecord, now: Callable[[], float]):
        self._record = record
        self._now = now
        self._is_done = False
        self._texts: list[str] = []

    async def take(self, response: Response) -> None:
        record = self._record
        if response.status != 200:
            detail = _error_text(await response.read())
            return _fail(record, f"http_{response.status}", detail)
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            return _fail(record, "malformed", f"content-type is {kind[:60]!r}, not an event stream")
        events = EventParser()
        try:
            async for part in response.parts():
                now = self._now()
                for data in events.feed(part):
                    self._take_event(data, now)
        except (EventError, ValueError, LookupError, TypeError, AttributeError) as error:
            return _fail(record, "malformed", f"{type(error).__name__}: {error}")
        record.text = "".join(self._texts)
        if not record.has_usage:
            record.num_output_tokens = len(record.release_s)
        if record.failure is None and not (self._is_done and record.ended_s is not None):
            _fail(record, "cut", "the stream ended without finish_reason and [DONE]")
        return None

    def _take_event(self, data: bytes, now: float) -> None:
        record = self._record
        if data == b"[DONE]":
            self._is_done = True
            return
        chunk = json.loads(data)
        if chunk.get("error"):
            _fail(record, "error_event", json.dumps(chunk["error"]))
            return
        for choice in chunk.get("choices") or ():
            self._take_choice(choice, now)
        if usage := chunk.get("usage"):
            record.has_usage = True
            record.num_output_tokens = int(usage["completion_tokens"])
            record.num_prompt_tokens = int(usage["prompt_tokens"])
            details = usage.get("prompt_tokens_details") or {}
            record.num_cached_tokens = int(details.get("cached_tokens") or 0)

    def _take_choice(self, choice: Mapping[str, Any], now: float) -> None:
        record = self._record
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        releases = text or delta.get("tool_calls") or delta.get("reasoning_content")
        reason = choice.get("finish_reason")
        # A chunk that only says "assistant", or only how it ended, brings nothing of the output; but an
        # output of no text at all has its first token where it ends.
        if releases or (reason and not record.release_s):
            record.release_s.append(now)
        if choice.get("index", 0) == 0:
            self._texts.append(text)
            record.finish_reason = reason or record.finish_reason
        if reason:
            record.ended_s = now


def _fail(record: RequestRecord, kind: str, detail: str) -> None:
    if record.failure is None:  # the first one is the cause
        record.failure, record.detail = kind, detail[:_MAX_DETAIL_LENGTH]


def _error_text(body: bytes) -> str:
    """The message of an OpenAI error object, or the body's beginning."""
    try:
        return str(json.loads(body)["error"]["message"])[:_MAX_DETAIL_LENGTH]
    except (ValueError, LookupError, TypeError):
        return body[:_MAX_DETAIL_LENGTH].decode(errors="replace")
