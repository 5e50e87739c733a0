"""A server for outside clients: a process of its own, with one API key and a chat template with tools.

Used by `scripts/run_clients`. Invariant: the process, and all that it started, is gone when this is closed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.clients.checks import Server
from scripts.clients.installs import CACHE, ROOT

KEY = "sk-of-the-client-checks"
READY = "ready on "
TEMPLATE = Path(__file__).parent / "data" / "chat_template.jinja"
START_S = 600.0  # a first start compiles everything
STOP_S = 30.0


class ServerError(Exception):
    """The server did not start, or did not end as it should; with the last lines that it said."""


class ServerProcess(contextlib.AbstractContextManager):
    """Starts a server and waits until it is ready.

    Args:
        model: the checkpoint.
        flags: more flags of `jaxserve serve`.

    Raises:
        ServerError: it ended, or is not ready after START_S.
    """

    def __init__(self, model: Path, flags: Sequence[str] = ()) -> None:
        CACHE.mkdir(parents=True, exist_ok=True)
        keys = CACHE / "api_keys.txt"
        keys.write_text(f"{KEY}\n", "utf-8")
        self._log = CACHE / "server.log"
        command = [sys.executable, "-m", "jaxserve.server", f"--model={model}", "--port=0"]
        command += [f"--api_key_file={keys}", f"--chat_template={TEMPLATE}"]
        command += ["--tool_call_parser=hermes", *flags]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT,
                start_new_session=True,  # so that its children are found, and ended, with it
            )  # fmt: skip
        try:
            self.server = Server(self._wait_until_ready(), model.name, KEY)
        except BaseException:
            self._kill()
            raise

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server did not start: {self._said()}")
            for line in self._log.read_text("utf-8", errors="replace").splitlines():
                if READY in line:
                    return line.partition(READY)[2].split()[0]
            time.sleep(0.2)
        raise ServerError(f"the server was not ready after {START_S:g} s: {self._said()}")

    def check_alive(self) -> None:
        """Requires that the server still runs.

        Raises:
            ServerError: it has ended.
        """
        if self._process.poll() is not None:
            raise ServerError(f"the server ended ({self._process.returncode}): {self._said()}")

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._kill()
            raise ServerError(f"the server did not end {STOP_S:g} s after SIGTERM") from None
        self._kill()
        if code != 0 and error[0] is None:
            raise ServerError(f"the server ended with {code}: {self._said()}")

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _said(self) -> str:
        lines = self._log.read_text("utf-8", errors="replace").splitlines()
        return " | ".join(lines[-6:])
