"""`Client`: the client's side of a line to an engine's loop; what `AsyncEngine` and `ProcessEngine` share.

It keeps who waits for what, and makes sure that nobody waits for an engine that is gone. How commands
and events travel, and what has to be ended, is left to the two.

Invariant: all state is changed in one event loop, the one that `start` ran in.
"""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from jaxserve.async_engine.commands import (
    AbortRequest,
    AddRequest,
    Answer,
    Command,
    Ended,
    Event,
    NotStarted,
    Query,
    QueryKind,
    Refused,
    Released,
    Started,
    Stop,
)
from jaxserve.async_engine.protocol import ServedModel
from jaxserve.async_engine.report import EngineReport
from jaxserve.async_engine.step_clock import StepClock
from jaxserve.async_engine.streams import Stream
from jaxserve.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    RequestError,
    shown,
)
from jaxserve.request import Request, RequestOutput, as_token_ids
from jaxserve.stats import EngineStats

WATCHDOG_TIMEOUT_S = 300.0
END_GRACE_S = 2.0  # for an engine to end by itself when it was told to, over what it may take
_WATCH_INTERVAL_S = 1.0
_START_ERRORS = {"ConfigError": ConfigError, "CheckpointError": CheckpointError}
_ANSWER_ERRORS: dict[str, type[Exception]] = {
    "ConfigError": ConfigError,
    "RuntimeError": RuntimeError,
}


class Client(ABC):
    """Meets `EngineClient`.

    Args:
        clock: written by the loop.
        watchdog_timeout_s: most seconds that a step may take; a longer one is taken for a hang.
    """

    def __init__(self, clock: StepClock, watchdog_timeout_s: float):
        is_number = isinstance(watchdog_timeout_s, int | float) and watchdog_timeout_s > 0
        if not is_number or isinstance(watchdog_timeout_s, bool):
            raise ConfigError(
                f"watchdog_timeout_s must be a number above 0, got {shown(watchdog_timeout_s)}"
            )
        self._clock = clock
        self._watchdog_timeout_s = float(watchdog_timeout_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch_timer: asyncio.TimerHandle | None = None
        self._model: ServedModel | None = None
        self._streams: dict[str, Stream] = {}
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count()
        self._started: asyncio.Future[Started] | None = None
        self._is_closing = False
        self._failure: str | None = None
        self._failed = asyncio.Event()
        self._ended = asyncio.Event()  # the loop has said so, or it is gone

    @abstractmethod
    async def _launch(self) -> None:
        """Starts the loop; its events go to `_take`."""

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Sends a command, without waiting; does nothing where there is nobody to hear it.

        Raises:
            InvalidRequestError: it holds something that cannot be sent.
        """

    @abstractmethod
    async def _wait_for_room(self) -> None:
        """Returns when the line takes another request."""

    @abstractmethod
    def _end_hung(self) -> None:
        """Shows on stderr where the loop hangs, and ends it where that can be done."""

    @abstractmethod
    async def _end(self, timeout_s: float) -> None:
        """Waits for the loop to end, so long; then ends it where that can be done. May be called again."""

    async def _served_model(self, started: Started) -> ServedModel:
        """What is served, out of what the loop told."""
        return started.model

    @property
    def model(self) -> ServedModel:
        """See `EngineClient`."""
        if self._model is None:
            raise RuntimeError("the model is known once start() has returned")
        return self._model

    @property
    def failure(self) -> str | None:
        """See `EngineClient`."""
        return self._failure

    async def wait_failed(self) -> str:
        """See `EngineClient`."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    async def start(self) -> None:
        """See `EngineClient`. Once only."""
        if self._loop is not None:
            raise RuntimeError("start() was called before")
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        try:
            await self._launch()
            self._model = await self._served_model(await self._started)
        except BaseException as error:  # a cancelled start leaves nothing behind either
            self._started.cancel()
            self._fail("the engine was not started")
            self._send(Stop(0.0))  # for a thread, which ends as soon as it hears it
            await self._end(0.0)
            if isinstance(error, asyncio.CancelledError) and self._is_closing:
                raise EngineDeadError("the engine was shut down while it started") from error
            raise
        self._watch()

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        """See `EngineClient`."""
        request = _checked(request)
        stream = await self._open(request)
        try:
            while True:
                part = await stream.next()
                yield part
                if part.finished:
                    return
        finally:
            self._leave(request.id, stream)

    async def _open(self, request: Request) -> Stream:
        await self._wait_for_room()
        self._check_alive()
        while (other := self._streams.get(request.id)) is not None:
            if not other.is_abandoned:
                raise InvalidRequestError(f"id {request.id!r} is already in flight", param="id")
            await other.wait_gone()
            self._check_alive()
        self._send(AddRequest(request))
        stream = self._streams[request.id] = Stream()
        return stream

    def _leave(self, request_id: str, stream: Stream) -> None:
        """The reader has gone; the request is known until the loop has ended it."""
        if self._streams.get(request_id) is stream:
            stream.is_abandoned = True
            self._send(AbortRequest(request_id))

    async def abort(self, request_id: str) -> None:
        """See `EngineClient`."""
        if request_id in self._streams:
            self._send(AbortRequest(request_id))

    async def stats(self) -> EngineStats:
        """See `EngineClient`."""
        found = (await self._ask("stats")).stats
        assert found is not None
        return found

    async def report(self, *, since_step: int = 0, with_pages: bool = False) -> EngineReport:
        """See `EngineClient`."""
        answer = await self._ask("report", since_step=since_step, with_pages=with_pages)
        assert answer.report is not None
        return answer.report

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient`."""
        await self._ask("reset_prefix_cache")

    async def _ask(
        self, kind: QueryKind, *, since_step: int = 0, with_pages: bool = False
    ) -> Answer:
        return await self._answer_to(
            lambda number: Query(
                number=number, kind=kind, since_step=since_step, with_pages=with_pages
            )
        )

    async def _answer_to(self, make: Callable[[int], Command]) -> Answer:
        """Sends a command that is answered, made of the number that it gets.

        Raises:
            RequestError: it failed; or an error of _ANSWER_ERRORS.
        """
        await self._wait_for_room()
        self._check_alive()
        assert self._loop is not None
        number = next(self._numbers)
        future = self._answers[number] = self._loop.create_future()
        try:
            self._send(make(number))
            answer = await future
        finally:
            del self._answers[number]
        if answer.error is not None:
            raise _ANSWER_ERRORS.get(answer.error_kind or "", RequestError)(answer.error)
        return answer

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        if self._is_closing:
            raise EngineDeadError("the engine is shutting down")
        if self._model is None:
            raise RuntimeError("start() has to be awaited first")

    async def shutdown(self, *, timeout_s: float = 0.0) -> None:
        """See `EngineClient`. Called again meanwhile, the sooner end counts."""
        is_starting = self._model is None
        self._is_closing = True
        if self._loop is None:
            self._fail("the engine was never started")
            return
        if self._failure is None and is_starting and self._started is not None:
            self._started.cancel()  # `start` raises
        else:
            self._send(Stop(timeout_s if self._failure is None else 0.0))
        wait_s = timeout_s + END_GRACE_S if self._failure is None else 0.0
        try:
            async with asyncio.timeout(wait_s):
                await self._ended.wait()
        except TimeoutError:
            pass
        await self._end(END_GRACE_S)
        self._fail("the engine was shut down")

    def _take(self, event: Event) -> None:
        """Takes what the loop says."""
        match event:
            case Released(outputs):
                self._take_outputs(outputs)
            case Refused(request_id):
                stream = self._streams.pop(request_id, None)
                if stream is not None:
                    stream.fail(_refusal(event))
            case Answer():
                future = self._answers.get(event.number)
                if future is not None and not future.done():
                    future.set_result(event)
            case Started():
                if self._started is not None and not self._started.done():
                    self._started.set_result(event)
            case NotStarted(kind, message):
                error = _START_ERRORS.get(kind, EngineDeadError)
                if error is EngineDeadError:
                    message = f"the engine could not be started: {kind}: {message}"
                if self._started is not None and not self._started.done():
                    self._started.set_exception(error(message))
                self._ended.set()
            case Ended(reason):
                self._ended.set()
                if reason is not None:
                    self._fail(reason)

    def _take_outputs(self, outputs: list[RequestOutput]) -> None:
        streams = self._streams
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del streams[output.request_id]
            stream.put(output)

    def _fail(self, reason: str) -> None:
        """Nothing more is served: whoever waits is told, at once. The first reason stays."""
        if self._failure is not None:
            return
        self._failure = reason
        self._failed.set()
        self._ended.set()
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        for stream in self._streams.values():
            stream.fail(EngineDeadError(reason))
        self._streams.clear()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineDeadError(reason))

    def _watch(self) -> None:
        """Looks, again and again, whether a step hangs."""
        busy_s = self._clock.busy_s()
        if self._failure is not None:
            return
        if busy_s > self._watchdog_timeout_s:
            self._end_hung()
            limit = f"watchdog_timeout_s ({self._watchdog_timeout_s:g})"
            self._fail(f"a step hangs: it has taken {busy_s:.1f} s, more than {limit}")
            return
        assert self._loop is not None
        interval_s = min(_WATCH_INTERVAL_S, self._watchdog_timeout_s / 4)
        self._watch_timer = self._loop.call_later(interval_s, self._watch)


def _checked(request: Request) -> Request:
    """A request as it is sent: its prompt copied, as plain ids.

    Raises:
        InvalidRequestError: its prompt is none, or it asks to be held.
    """
    if not isinstance(request, Request):
        raise InvalidRequestError(f"request must be a Request, got {shown(request)}")
    if request.hold:
        raise InvalidRequestError(
            "hold must be false: it is for Engine.fork, which an engine that is awaited does not have",
            param="hold",
        )
    return replace(request, prompt_token_ids=as_token_ids(request.prompt_token_ids))


def _refusal(event: Refused) -> RequestError:
    kind = InvalidRequestError if event.is_invalid else RequestError
    return kind(event.message, param=event.param, code=event.code)
