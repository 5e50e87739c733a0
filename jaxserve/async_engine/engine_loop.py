"""`EngineLoop`: commands in, steps, events out; the same loop in a thread and in a process.

    while a request is in flight:   take commands -> step -> send what it released
    while none is:                  wait for a command

Run by `AsyncEngine`'s thread and by `process_main`. Only the thread that runs it touches the engine.

A step that raises is repeated: the engine recovers by itself and computes the unfinished requests again
from the tokens they had (`Engine.step`). MAX_FAILED_STEPS of them in a row are taken for a fault that
stays, and end the loop.

Invariant: `commands` says what is answered by what; all of it is sent from this loop, in order.
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from jaxserve.async_engine.commands import (
    AbortRequest,
    AddRequest,
    Answer,
    Change,
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
from jaxserve.async_engine.preparations import Preparations
from jaxserve.async_engine.protocol import ServedModel
from jaxserve.async_engine.report import ReportCollector
from jaxserve.async_engine.step_clock import StepClock
from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequestError
from jaxserve.prepare import Prepared, Preparer
from jaxserve.replicas.engine import ReplicatedEngine
from jaxserve.request import CompletionOutput, Request, RequestOutput

MAX_FAILED_STEPS = 3

_LOG = logging.getLogger(__name__)


class ClientGone(Exception):
    """Nobody is at the other end of the line any more."""


class StepsFailed(Exception):
    """The engine cannot go on."""


class Line(Protocol):
    """The engine's end of a line to a client."""

    def receive(self, timeout_s: float | None) -> list[Command]:
        """The commands that have come, in order.

        Args:
            timeout_s: how long to wait for the first one, or for `wake`; None = for ever.

        Raises:
            ClientGone: there will be none.
        """
        ...

    def send(self, event: Event) -> None:
        """Sends, or puts aside what does not fit at the moment; never waits."""
        ...

    def wake(self) -> None:
        """Ends a `receive` that waits; called from any thread."""
        ...


class Served(NamedTuple):
    """An engine to run, and what its clients may know of it."""

    engine: Engine | ReplicatedEngine
    preparer: Preparer
    model: ServedModel
    close: Callable[[], object] = lambda: None  # called when the loop has ended


def serve_line(make: Callable[[], Served], line: Line, clock: StepClock) -> None:
    """Makes an engine and runs it until its client wants no more; says on the line how it went.

    Args:
        make: loads the model and compiles; raises what `LLM` raises.
        line: to the client.
        clock: shows how long a step takes.
    """
    try:
        served = make()
        served.preparer.load_tables()
    except Exception as error:  # noqa: BLE001 - whatever loading can raise: the client tells the user
        _LOG.debug("the engine could not be made", exc_info=True)
        line.send(NotStarted(type(error).__name__, str(error)))
        return
    line.send(Started(served.model))
    try:
        EngineLoop(served, line, clock).run()
        reason = None
    except ClientGone:
        return
    except StepsFailed as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - the client is told
        _LOG.exception("the engine's loop failed")
        reason = f"the engine's loop failed: {type(error).__name__}: {error}"
    finally:
        clock.end()
        served.close()
    line.send(Ended(reason))


class EngineLoop:
    """Runs one engine for one client.

    Args:
        served: the engine; nobody else drives it.
        line: to the client.
        clock: shows how long a step takes.
    """

    def __init__(self, served: Served, line: Line, clock: StepClock):
        self._engine, self._preparer = served.engine, served.preparer
        self._line = line
        self._clock = clock
        self._preparations = Preparations(served.preparer, line.wake)
        self._collector = ReportCollector(served.engine)
        self._open: dict[str, Request] = {}  # by id: added, their endings not sent yet
        self._told: set[str] = set()  # ids whose prompt_logprobs were sent
        self._num_failed_steps = 0
        self._end_s: float | None = None  # by time.monotonic; None = nobody wants the loop to end

    def run(self) -> None:
        """Returns after a `Stop`; nothing is in flight then.

        Raises:
            ClientGone: the client has left; all was aborted.
            StepsFailed: the engine cannot go on.
        """
        try:
            while not self._has_to_end():
                self._round()
            self._abort_all()
        except ClientGone:
            self._abort_all()
            raise
        finally:
            self._preparations.close()
            self._collector.close()

    def _round(self) -> None:
        for command in self._receive():
            self._handle(command)
        for request_id, result in self._preparations.take():
            self._admit(request_id, result)
        if self._engine.has_work():
            self._step()

    def _receive(self) -> list[Command]:
        """Commands; waits for some while there is nothing else to do."""
        if self._engine.has_work():
            timeout_s = 0.0
        elif self._end_s is None:
            timeout_s = None
        else:  # a request is still prepared
            timeout_s = max(0.0, self._end_s - time.monotonic())
        if timeout_s != 0.0:
            self._clock.end()
        commands = self._line.receive(timeout_s)
        self._clock.begin()
        return commands

    def _has_to_end(self) -> bool:
        if self._end_s is None:
            return False
        return not self._open or time.monotonic() >= self._end_s

    def _handle(self, command: Command) -> None:
        match command:
            case AddRequest(request):
                self._add(request)
            case AbortRequest(request_id):
                self._abort(request_id)
            case Query():
                self._line.send(self._answer(command))
            case Change():
                self._line.send(self._change(command))
            case Stop(timeout_s):
                end_s = time.monotonic() + timeout_s
                self._end_s = end_s if self._end_s is None else min(end_s, self._end_s)

    def _add(self, request: Request) -> None:
        if request.id in self._open:
            error = InvalidRequestError(f"id {request.id!r} is already in flight", param="id")
            self._refuse(request.id, error)
            return
        self._open[request.id] = request
        if not self._preparer.is_quick(request):
            self._preparations.begin(request)
            return
        try:
            prepared: Prepared | Exception = self._preparer.prepare(request)
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            prepared = error
        self._admit(request.id, prepared)

    def _admit(self, request_id: str, prepared: Prepared | Exception) -> None:
        """Queues a request that is prepared, or refuses it."""
        if not isinstance(prepared, Exception):
            try:
                self._engine.add(*prepared)
                return
            except Exception as error:  # noqa: BLE001 - told to whoever asked
                prepared = error
        del self._open[request_id]
        self._refuse(request_id, prepared)

    def _refuse(self, request_id: str, error: Exception) -> None:
        if isinstance(error, InvalidRequestError):
            self._line.send(Refused(request_id, error.message, error.param, error.code, True))
            return
        _LOG.error("request %r could not be taken", request_id, exc_info=error)
        message = f"the engine could not take the request: {type(error).__name__}: {error}"
        self._line.send(Refused(request_id, message, None, None, False))

    def _abort(self, request_id: str) -> None:
        request = self._open.get(request_id)
        if request is None:
            return  # its ending is on its way
        if request_id in self._preparations:
            self._preparations.cancel(request_id)
            output = _never_begun(request)
        else:
            output = self._engine.abort(request_id)
            assert output is not None, (
                f"request {request_id!r} is in flight, and the engine has none"
            )
        self._release([output])

    def _abort_all(self) -> None:
        for request_id in list(self._open):
            self._abort(request_id)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._num_failed_steps += 1
            _LOG.exception("a step failed (%d in a row)", self._num_failed_steps)
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise StepsFailed(
                    f"{MAX_FAILED_STEPS} steps in a row failed, the last with "
                    f"{type(error).__name__}: {error}"
                ) from error
            return
        self._num_failed_steps = 0
        if outputs:
            self._release(outputs)

    def _release(self, outputs: list[RequestOutput]) -> None:
        for number, output in enumerate(outputs):
            request_id = output.request_id
            if output.prompt_logprobs is not None:
                if request_id in self._told:
                    output.prompt_logprobs = None
                self._told.add(request_id)
            if output.finished:
                beam = self._open.pop(request_id).beam
                self._told.discard(request_id)
                if beam is not None:
                    outputs[number] = self._preparer.with_texts(output, beam)
        self._line.send(Released(outputs))

    def _answer(self, query: Query) -> Answer:
        try:
            if query.kind == "stats":
                return Answer(number=query.number, stats=self._engine.stats())
            if query.kind == "report":
                report = self._collector.report(
                    since_step=query.since_step, with_pages=query.with_pages
                )
                return Answer(number=query.number, report=report)
            self._engine.reset_prefix_cache()
            return Answer(number=query.number)
        except Exception as error:  # noqa: BLE001 - the client is told
            _LOG.exception("%s failed", query.kind)
            message = f"{query.kind} failed: {type(error).__name__}: {error}"
            return Answer(number=query.number, error=message)

    def _change(self, change: Change) -> Answer:
        method = getattr(self._engine, change.kind)
        try:
            version = method(**change.arguments)
        except Exception as error:  # noqa: BLE001 - raised again by the client
            return Answer(number=change.number, error=str(error), error_kind=type(error).__name__)
        return Answer(number=change.number, weights_version=version)


def _never_begun(request: Request) -> RequestOutput:
    """What comes of a request that was aborted before the engine had it."""
    choices = range(request.sampling_params.n)
    outputs = [CompletionOutput(index, "", [], finish_reason="abort") for index in choices]
    return RequestOutput(request.id, outputs, len(request.prompt_token_ids), 0, finished=True)
