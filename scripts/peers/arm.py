"""One engine under measurement: a worker process that is asked for one run at a time.

Used by `scripts/bench_peers`. Linux' /proc says how much the worker and everything else on the machine
computed meanwhile; elsewhere those figures are None. Invariant: a worker and all that it started are
gone when its arm is closed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.outside import PeerError
from scripts.peers.installs import ROOT

_PATIENCE_S = 20  # for a worker whose stdin has ended


class Arm(contextlib.AbstractContextManager):
    """Starts a worker.

    Args:
        name: of the engine.
        command: how its worker is started, in the checkout.
        log: file for what it says on stderr.
        environment: variables on top of this process's own.
        shares_prefixes: whether it can run with a prefix cache.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        shares_prefixes: bool = False,
    ):
        self.name, self.shares_prefixes = name, shares_prefixes
        self.versions: dict[str, str] = {}
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=os.environ | dict(environment or {}),
                start_new_session=True,  # so that its children are found, and ended, with it
            )

    def wait_until_ready(self) -> None:
        """Returns when it has loaded; raises PeerError where it ended instead."""
        self.versions = self.read()["versions"]

    def ask(self, **command: Any) -> dict[str, Any]:
        """Its reply to a command of protocol.py; raises PeerError where it ended instead."""
        self.send(**command)
        return self.read()

    def measure(self, workload: Path, *, prefix_caching: bool) -> dict[str, Any]:
        """One run of a workload, with cpu_s of its own and others_cpu_s of all else on the machine."""
        before = busy_cpu_s(), session_cpu_s(self._process.pid)
        reply = self.ask(workload=str(workload), prefix_caching=prefix_caching)
        after = busy_cpu_s(), session_cpu_s(self._process.pid)
        reply["cpu_s"] = reply["others_cpu_s"] = None
        if None not in (*before, *after):
            all_s, own_s = (end - begin for begin, end in zip(before, after, strict=True))
            reply["cpu_s"] = own_s
            reply["others_cpu_s"] = max(0.0, all_s - own_s)  # two clocks: a little below 0 is 0
        return reply

    def send(self, **command: Any) -> None:
        """Sends a command; the worker may still be loading."""
        with contextlib.suppress(BrokenPipeError):  # `read` tells how it ended
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """The next line that it says; raises PeerError where it ended instead."""
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        said = [
            text for text in self._log.read_text("utf-8", "replace").splitlines() if text.strip()
        ]
        reason = f": {said[-1].strip()}" if said else ""
        raise PeerError(f"the {self.name} arm ended with status {status}{reason} ({self._log})")

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # interrupted, or failed: nobody waits for the end of a run
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # the worker leaves its loop
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_PATIENCE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # whatever of its session is left
        self._process.wait()
        self._process.stdout.close()


def busy_cpu_s() -> float | None:
    """Seconds that all cores together have worked since the machine started; None if not on Linux."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    user, nice, system, _idle, _iowait, *interrupts_and_steal = map(
        int, stat.read_text().partition("\n")[0].split()[1:9]
    )
    return sum((user, nice, system, *interrupts_and_steal)) / os.sysconf("SC_CLK_TCK")


def session_cpu_s(session: int) -> float | None:
    """Seconds that the live processes of a session have worked; None if not on Linux.

    Args:
        session: the process that leads it.
    """
    if not Path("/proc/stat").is_file():
        return None
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))  # its own and its ended children's
    return ticks / os.sysconf("SC_CLK_TCK")


def time_start(arm: Arm, workload: Path, begin: float) -> float:
    """Seconds from `begin` to the first token of a request that waits while the engine loads.

    Args:
        arm: just started.
        workload: of one request.
        begin: by time.perf_counter(), right before it was started.
    """
    arm.send(workload=str(workload), prefix_caching=arm.shares_prefixes, max_tokens=1)
    arm.wait_until_ready()
    arm.read()
    seconds = time.perf_counter() - begin
    print(f"{arm.name}: first token after {seconds:.1f} s", file=sys.stderr)
    return seconds
