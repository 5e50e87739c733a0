"""`ProcessEngine`: an engine in a process of its own, for the server; meets `EngineClient`.

So HTTP work and engine work share no interpreter lock, and a dead engine takes nobody with it. The
process is a fresh interpreter (nothing is forked or pickled); it is joined by a pair of sockets that
nobody else can reach, and by one page of shared memory with its `StepClock`.

It is watched from here: its death is seen at once (the socket closes, the process can be waited for), a
step that hangs when it has taken longer than the watchdog allows; then it is told to write its stacks
to stderr, and killed with all that it started. If this process dies, the engine's ends by itself.

Invariant: when `shutdown` has returned, or `failure` has been set for a second, no process is left.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from jaxserve.async_engine.client import WATCHDOG_TIMEOUT_S, Client
from jaxserve.async_engine.commands import Command, Started
from jaxserve.async_engine.messages import Message, Settings, StartedMessage
from jaxserve.async_engine.pipes import ClientLine
from jaxserve.async_engine.protocol import ServedModel
from jaxserve.async_engine.step_clock import StepClock
from jaxserve.config import EngineConfig

STACKS_SIGNAL = signal.SIGUSR1  # tells the process to write its stacks to stderr
CHILD = "jaxserve.async_engine.process_main"
_STACKS_S = 0.5  # that it has for it
_START_CHILD = (  # with the modules that this process sees, wherever it was started
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); "
    "import importlib; importlib.import_module(sys.argv.pop(1)).main(sys.argv[1:])"
)

_LOG = logging.getLogger(__name__)


class ProcessEngine(Client):
    """An engine in a process of its own; see `EngineClient`.

    Args:
        model, generation_config, options: as of `LLM`.
        watchdog_timeout_s: most seconds that a step may take before the process is killed.
        child: the module whose `main` is the process; for tests.

    Raises:
        ConfigError: an option is unknown or out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        generation_config: str = "auto",
        watchdog_timeout_s: float = WATCHDOG_TIMEOUT_S,
        child: str = CHILD,
        **options: object,
    ):
        EngineConfig.from_options(options)
        super().__init__(StepClock(), watchdog_timeout_s)
        self._settings = Settings(
            model=model,
            generation_config=generation_config,
            options=_plain(options),
            log_level=logging.getLogger("jaxserve").getEffectiveLevel(),
        )
        self._child = child
        self._process: subprocess.Popen[bytes] | None = None
        self._line: ClientLine | None = None
        self._exited = asyncio.Event()
        self._kill_s = 0.0  # by the event loop's clock: not before, it is writing its stacks

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None before it was started."""
        return None if self._process is None else self._process.pid

    async def _launch(self) -> None:
        assert self._loop is not None
        ours, theirs = socket.socketpair()
        # A file without a name, not anonymous memory: it has to reach a process that is no fork.
        with theirs, tempfile.TemporaryFile(prefix="jaxserve-") as memory:
            memory.truncate(mmap.PAGESIZE)
            self._clock = StepClock(mmap.mmap(memory.fileno(), mmap.PAGESIZE))
            fds = (theirs.fileno(), memory.fileno())
            try:
                self._process = _start_process(self._child, fds)
            except BaseException:
                ours.close()
                raise
        threading.Thread(
            target=self._wait_for_process,
            args=(self._process, self._loop),
            name="engine-process",
            daemon=True,
        ).start()
        self._line = ClientLine(self._take_message, self._line_lost)
        line = self._line
        await self._loop.create_unix_connection(lambda: line, sock=ours)
        self._line.send(self._settings)

    def _wait_for_process(
        self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop
    ) -> None:
        """In a thread: sees the process end, and ends what it started and left behind."""
        # Left waitable: as long as it is, nobody else can have its number.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _kill_group(process.pid)
        process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            loop.call_soon_threadsafe(self._process_ended, process.returncode)

    def _process_ended(self, returncode: int) -> None:
        self._exited.set()
        if not self._ended.is_set():
            self._fail(f"the engine's process ended ({_ending(returncode)})")

    def _line_lost(self, fault: str | None) -> None:
        if self._ended.is_set():
            return
        if fault is not None:
            self._fail(f"the engine's process sent nonsense: {fault}")
            self._kill()
            return
        # It closes as the process dies, whose end is told a moment later, and how it ended.
        assert self._loop is not None
        self._loop.call_later(_STACKS_S, self._process_silent)

    def _process_silent(self) -> None:
        if not self._ended.is_set():
            self._fail("the engine's process closed its line")
            self._kill()

    def _take_message(self, message: Message) -> None:
        if isinstance(message, StartedMessage):
            if self._started is not None and not self._started.done():
                self._started.set_result(message)  # type: ignore[arg-type]
        else:
            self._take(message)  # type: ignore[arg-type]

    async def _served_model(self, started: Started | StartedMessage) -> ServedModel:
        assert isinstance(started, StartedMessage)
        return await asyncio.to_thread(started.to_model)

    def _send(self, command: Command) -> None:
        if self._line is not None:
            self._line.send(command)

    async def _wait_for_room(self) -> None:
        if self._line is not None:
            await self._line.wait_for_room()

    def _end_hung(self) -> None:
        assert self._loop is not None
        assert self._process is not None
        _LOG.error(
            "a step hangs; the stacks of the engine's process (%d) follow", self._process.pid
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, STACKS_SIGNAL)
        self._kill_s = self._loop.time() + _STACKS_S
        self._loop.call_at(self._kill_s, self._kill)

    def _kill(self) -> None:
        if self._process is not None and not self._exited.is_set():
            _kill_group(self._process.pid)

    async def _end(self, timeout_s: float) -> None:
        if self._process is None:
            return
        assert self._loop is not None
        if self._failure is not None:
            timeout_s = max(0.0, self._kill_s - self._loop.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._exited.wait()
        self._kill()
        await self._exited.wait()
        if self._line is not None:
            self._line.close()


def _start_process(child: str, fds: tuple[int, int]) -> subprocess.Popen[bytes]:
    code = [sys.executable, "-P", "-c", _START_CHILD, "\n".join(sys.path), child]
    return subprocess.Popen(
        [*code, *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=2,  # what this process prints may be read by somebody
        start_new_session=True,  # Ctrl-C in the terminal is for this process, which ends the other
    )


def _kill_group(pid: int) -> None:
    """Kills a process that leads its group, and all in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def _plain(options: Mapping[str, object]) -> dict[str, object]:
    """Options as they are sent: paths as texts."""
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in options.items()
    }
