"""`AsyncEngine`: an engine in a thread of this process, for callers that await. Public; stdlib only.

    async with AsyncEngine("checkpoints/smollm2-135m-instruct") as engine:
        async for part in engine.generate("The capital of France is", SamplingParams(max_tokens=64)):
            print(part.outputs[0].text, end="")

It meets `EngineClient`, as `ProcessEngine` does, and runs the same loop. The interpreter lock is shared
with the caller: while the device computes it is free, but heavy work in the event loop slows steps down.

Invariant: commands go through one queue, events come through one call of the event loop at a time.
"""

import asyncio
import contextlib
import faulthandler
import itertools
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal, Self

from jaxserve.async_engine.client import WATCHDOG_TIMEOUT_S, Client
from jaxserve.async_engine.commands import Answer, Change, Command, Ended, Event
from jaxserve.async_engine.engine_loop import ClientGone, Served, serve_line
from jaxserve.async_engine.served import load_served, served_engine, served_llm
from jaxserve.async_engine.step_clock import StepClock
from jaxserve.config import EngineConfig
from jaxserve.echo import PromptFirst
from jaxserve.errors import InvalidRequestError
from jaxserve.llm_arguments import Prompt, as_prompts
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.llm import LLM


class ThreadLine:
    """The engine's end, and the client's, of a line within a process.

    Args:
        loop: the client's event loop.
        take: called in it with each event, in order.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[Event], None]):
        self._loop = loop
        self._take = take
        self._commands: SimpleQueue[Command | None] = SimpleQueue()  # None: somebody called `wake`
        self._events: deque[Event] = deque()

    def put(self, command: Command) -> None:
        """The client's end: sends a command."""
        self._commands.put(command)

    def wake(self) -> None:
        """See `Line`."""
        self._commands.put(None)

    def receive(self, timeout_s: float | None) -> list[Command]:
        """See `Line`."""
        found: list[Command | None] = []
        with contextlib.suppress(Empty):
            if timeout_s != 0.0:
                found.append(self._commands.get(timeout=timeout_s))
            while True:
                found.append(self._commands.get_nowait())
        if self._loop.is_closed():
            raise ClientGone
        return [command for command in found if command is not None]

    def send(self, event: Event) -> None:
        """See `Line`. Events that the client has not taken yet go with the ones before them."""
        self._events.append(event)
        if len(self._events) == 1:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: `receive` says so
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """Gives the client all events that are there; in its event loop."""
        while self._events:
            # Taken out last: an event that is sent meanwhile finds it there and calls nobody.
            self._take(self._events[0])
            self._events.popleft()


class AsyncEngine(Client):
    """An engine in a thread; see `EngineClient` for the methods that are not described here.

    All of them are called from the event loop that `start` ran in.

    Args:
        model, generation_config, options: as of `LLM`.
        watchdog_timeout_s: most seconds that a step may take. After that the stacks of all threads are
            written to stderr and every request fails; the thread itself cannot be ended.

    Raises:
        ConfigError: an option is unknown or out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        generation_config: str = "auto",
        watchdog_timeout_s: float = WATCHDOG_TIMEOUT_S,
        **options: object,
    ):
        EngineConfig.from_options(options)
        self._prepare(lambda: load_served(model, generation_config, options), watchdog_timeout_s)

    @classmethod
    def from_llm(
        cls, llm: "LLM", *, watchdog_timeout_s: float = WATCHDOG_TIMEOUT_S
    ) -> "AsyncEngine":
        """Over an `LLM` that is there already. It belongs to this engine until `shutdown` returns.

        Raises:
            ValueError: it has requests in flight.
        """
        if llm.has_work():
            raise ValueError("llm has requests in flight: let them end first")
        return cls.from_served(lambda: served_llm(llm), watchdog_timeout_s=watchdog_timeout_s)

    @classmethod
    def from_engine(
        cls, engine: "Engine", *, watchdog_timeout_s: float = WATCHDOG_TIMEOUT_S
    ) -> "AsyncEngine":
        """Over an `Engine` that is there already, as `build_engine` makes it: token ids only. It belongs
        to this one until `shutdown` returns.

        Raises:
            ValueError: it has requests in flight.
        """
        stats = engine.stats()
        if engine.has_work() or stats.num_running or stats.num_waiting:
            raise ValueError("engine has requests in flight: let them end first")
        return cls.from_served(lambda: served_engine(engine), watchdog_timeout_s=watchdog_timeout_s)

    @classmethod
    def from_served(
        cls, make: Callable[[], Served], *, watchdog_timeout_s: float = WATCHDOG_TIMEOUT_S
    ) -> "AsyncEngine":
        """Over any engine.

        Args:
            make: called in the thread that will drive it.
            watchdog_timeout_s: as above.
        """
        self = cls.__new__(cls)
        self._prepare(make, watchdog_timeout_s)
        return self

    def _prepare(self, make: Callable[[], Served], watchdog_timeout_s: float) -> None:
        super().__init__(StepClock(), watchdog_timeout_s)
        self._make = make
        self._line: ThreadLine | None = None
        self._thread: threading.Thread | None = None
        self._request_numbers = itertools.count()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()

    def generate(
        self, request: Request | Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Runs one request; see `EngineClient.generate`.

        Args:
            request: a `Request`; or just its prompt, a text or token ids.
            sampling_params: with a prompt: how to decode it; None = the checkpoint's own. `echo` is
                heeded then.

        Raises:
            InvalidRequestError: the request is at fault.
        """
        if isinstance(request, Request):
            if sampling_params is not None:
                raise InvalidRequestError(
                    "sampling_params stand in the Request; give them with a prompt only",
                    param="sampling_params",
                )
            return super().generate(request)
        params = self.model.default_sampling_params if sampling_params is None else sampling_params
        prompts = as_prompts(request)
        if len(prompts) != 1:
            raise InvalidRequestError(
                f"prompt must be one text or one list of token ids, got {len(prompts)} of them",
                param="prompt",
            )
        prompt = prompts[0]
        made = Request(
            id=f"async-{next(self._request_numbers)}",
            prompt_token_ids=self._encode(prompt) if isinstance(prompt, str) else prompt,
            sampling_params=params,
        )
        return self._with_prompt(made) if params.echo else super().generate(made)

    def _encode(self, prompt: str) -> list[int]:
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "this checkpoint has no tokenizer: give the prompt as token ids", param="prompt"
            )
        return tokenizer.encode(prompt)

    async def _with_prompt(self, request: Request) -> AsyncGenerator[RequestOutput]:
        tokenizer = self.model.tokenizer
        ids, skip = request.prompt_token_ids, request.sampling_params.skip_special_tokens
        text = "" if tokenizer is None else tokenizer.decode(ids, skip)
        first = PromptFirst(ids, text)
        async with contextlib.aclosing(super().generate(request)) as parts:
            async for part in parts:
                yield first(part)

    async def update_params(self, params: object, *, mode: str = "continue") -> int:
        """Goes on with other weights of the same model, between two steps; see `Engine.update_params`.

        Args:
            params: as of `Engine.update_params`; leave numpy arrays alone until this has returned.
            mode: "continue", "finish_old" or "abort". With finish_old too this returns at once; tokens
                say which weights sampled them.

        Returns:
            The version that tokens of the new weights will be tagged with.

        Raises:
            ConfigError: another tree, shape or type, or no such mode; nothing has changed.
        """
        version = (await self._change("update_params", params=params, mode=mode)).weights_version
        assert version is not None
        return version

    async def sleep(self, *, level: int = 1) -> None:
        """Gives memory back, as `Engine.sleep` says; requests wait for `wake`."""
        await self._change("sleep", level=level)

    async def wake(self) -> None:
        """Goes on after `sleep`; see `Engine.wake`.

        Raises:
            RuntimeError: the weights were given up, and no others were given.
        """
        await self._change("wake")

    async def _change(
        self, kind: Literal["update_params", "sleep", "wake"], **arguments: object
    ) -> Answer:
        return await self._answer_to(
            lambda number: Change(number=number, kind=kind, arguments=arguments)
        )

    async def _launch(self) -> None:
        assert self._loop is not None
        self._line = ThreadLine(self._loop, self._take)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        assert self._line is not None
        try:
            serve_line(self._make, self._line, self._clock)
        except BaseException as error:
            self._line.send(Ended(f"the engine's thread failed: {type(error).__name__}: {error}"))
            raise

    def _send(self, command: Command) -> None:
        if self._line is not None:
            self._line.put(command)

    async def _wait_for_room(self) -> None:
        """A queue within a process holds what its callers hold anyway."""

    def _end_hung(self) -> None:
        sys.stderr.flush()
        faulthandler.dump_traceback(file=2, all_threads=True)

    async def _end(self, timeout_s: float) -> None:
        """A thread cannot be ended: one that hangs goes with the process."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            await asyncio.to_thread(thread.join, timeout_s)
