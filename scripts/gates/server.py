"""A server of `scripts/server_gates`: started on 127.0.0.1, watched through /proc, and ended.

Invariant: it and all that it started are gone when its context is left.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from jaxserve.server.load.http_client import Address, HttpClient, HttpError

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "checkpoints" / "tiny_llama"
# Few programs, so that a start compiles for seconds.
NUM_SLOTS = 16
FEW_SHAPES = (
    f"--max_num_seqs={NUM_SLOTS}",
    "--max_num_batched_tokens=64",
    "--token_buckets=16,64",
    "--row_buckets=4,16",
)
RUNNING = "jaxserve:num_requests_running"
WAITING = "jaxserve:num_requests_waiting"
OWNED = 'jaxserve:pages{state="owned"}'
_READY = re.compile(r"jaxserve: ready on (http://\S+)")
_START_LIMIT_S = 300  # a first start compiles
_STOP_LIMIT_S = 30
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_METRIC = re.compile(r"^([a-z_:]+)(?:\{(.*?)\})? (\S+)$", re.MULTILINE)


class GateError(Exception):
    """A gate that could not be run."""


class Server(contextlib.AbstractContextManager["Server"]):
    """One server process.

    Args:
        model: what it serves.
        flags: of `jaxserve serve`.
        log: file for what it says.
    """

    def __init__(self, model: str | Path, *flags: str, log: Path):
        self.url = ""
        self._log = log
        self._known: set[tuple[int, int]] = set()
        command = [sys.executable, "-m", "jaxserve", "serve", f"--model={model}"]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, "--host=127.0.0.1", "--port=0", *flags],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is for the gates, which end it
            )

    def __enter__(self) -> "Server":
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def _wait_until_ready(self) -> None:
        limit = time.monotonic() + _START_LIMIT_S
        while not (found := _READY.search(self.said())):
            if self.process.poll() is not None:
                raise GateError(f"the server ended with {self.process.returncode}: {self.tail()}")
            if time.monotonic() > limit:
                raise GateError(f"the server was not ready after {_START_LIMIT_S} s: {self.tail()}")
            time.sleep(0.05)
        self.url = found[1]

    def said(self) -> str:
        """Its log."""
        return self._log.read_text("utf-8", "replace")

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.said().splitlines()[-5:])

    def http(self, *, keep_alive: bool = True) -> HttpClient:
        """A client of it."""
        return HttpClient(Address.parse(self.url), keep_alive=keep_alive)

    def pids(self) -> list[int]:
        """It and all that it started and that lives, also what has lost its parent since the last call."""
        live = _live_processes()
        family = {self.process.pid}
        while more := {pid for pid, one in live.items() if one.parent in family} - family:
            family |= more
        self._known |= {(pid, live[pid].started) for pid in family if pid in live}
        self._known = {
            (pid, at) for pid, at in self._known if pid in live and live[pid].started == at
        }
        return [pid for pid, _ in self._known]

    def rss_bytes(self) -> int:
        """Memory that they hold."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError, IndexError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        return total

    def num_descriptors(self) -> int:
        """Files and sockets that they have open."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                total += len(os.listdir(f"/proc/{pid}/fd"))
        return total

    def stop(self) -> tuple[int | None, float]:
        """(exit code after SIGTERM, or None if it had to be killed; seconds that it took)."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        return code, time.monotonic() - begin

    def kill(self) -> None:
        """Ends everything that is left of it."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None and exc[0] is None:
            self.stop()
        self.kill()


class _Process(NamedTuple):
    """A process that lives: its parent, and when it was started (in ticks of the system)."""

    parent: int
    started: int


def _live_processes() -> dict[int, _Process]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it has ended since
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[int(path.parent.name)] = _Process(int(fields[1]), int(fields[19]))
    return found


async def gauges(http: HttpClient) -> dict[str, float]:
    """/metrics: value by name, or by name{labels} without model_name.

    Raises:
        GateError: it does not answer.
    """
    try:
        async with asyncio.timeout(30), http.request("GET", "/metrics") as response:
            text = (await response.read()).decode()
    except (HttpError, TimeoutError) as error:
        raise GateError(f"/metrics does not answer: {error!r}") from None
    found: dict[str, float] = {}
    for name, labels, value in _METRIC.findall(text):
        kept = [label for label in labels.split(",") if label and "model_name=" not in label]
        found[f"{name}{{{','.join(kept)}}}" if kept else name] = float(value)
    for name in (RUNNING, WAITING, OWNED):
        if name not in found:
            raise GateError(f"/metrics has no {name} (status {response.status})")
    return found


async def wait_let_in(http: HttpClient, num_requests: int, limit_s: float = 60.0) -> None:
    """Returns when that many requests run or wait at once.

    Raises:
        GateError: there never were so many.
    """
    begin, most = time.monotonic(), 0.0
    while most < num_requests:
        if time.monotonic() - begin > limit_s:
            raise GateError(f"at most {most:.0f} of {num_requests} requests ran or waited at once")
        found = await gauges(http)
        most = max(most, found[RUNNING] + found[WAITING])
        await asyncio.sleep(0.005)


async def wait_idle(http: HttpClient, limit_s: float = 10.0) -> tuple[dict[str, float], float]:
    """(the gauges once nothing runs or waits, or as they are when the time is over; seconds waited)."""
    begin = time.monotonic()
    while True:
        found = await gauges(http)
        waited = time.monotonic() - begin
        if not found[RUNNING] + found[WAITING] + found[OWNED] or waited > limit_s:
            return found, waited
        await asyncio.sleep(0.02)
