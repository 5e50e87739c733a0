"""`ServerProcess`: a server in a process of its own, for tests that need sockets, signals and exit codes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent.parent
ADDRESS = "http://127.0.0.1:8000"  # of the documents
TINY = ROOT / "checkpoints" / "tiny_llama"
SMALL = (
    "--max_num_seqs=4",
    "--max_num_batched_tokens=32",
    "--token_buckets=4,32",
    "--row_buckets=4",
    "--max_model_len=512",
    "--num_pages=200",
    "--page_size=16",
)
START_PATIENCE_S = 300.0  # of a real server that compiles
PATIENCE_S = 60.0  # of tests on a busy machine; nothing is that slow


class ServerProcess:
    """Starts a server and reads its log. Ended by `close`, or by leaving its `with`.

    Args:
        command: what to run; it says "ready on http://..." when it serves.
        environment: more variables.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {}),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def fake(cls, *, config: dict | None = None, **client: object) -> "ServerProcess":
        """One over a fake engine.

        Args:
            config: of `ServerConfig`.
            client: of `fake_server.SlowClient`.
        """
        given = json.dumps({"config": config or {}, "client": client})
        return cls([sys.executable, "-m", "tests.server.fake_server", given])

    @classmethod
    def tiny(cls, cache: Path, *flags: str) -> "ServerProcess":
        """A real one: `jaxserve serve` on tiny_llama, with few programs.

        Args:
            cache: where compiled programs are kept from one to the next.
            flags: more of the command's flags.
        """
        command = [sys.executable, "-m", "jaxserve.server", f"--model={TINY}", "--port=0"]
        return cls([*command, *SMALL, f"--compilation_cache_dir={cache}", *flags])

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def port(self) -> int:
        """Where it listens; known as soon as it does."""
        found = self.wait_for_line(r"http://127\.0\.0\.1:(\d+)")
        return int(found[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> "ServerProcess":
        """Returns it once it serves."""
        self.wait_until(lambda: "ready on http://" in self.log, START_PATIENCE_S)
        return self

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """The first match of a pattern in its log."""
        return self.wait_until(lambda: re.search(pattern, self.log))

    def wait_until[T](self, what: Callable[[], T | None], patience_s: float = PATIENCE_S) -> T:
        """What a function gives, as soon as that is true."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            found = what()
            if found:
                return found
            if self._process.poll() is not None:
                self._reader.join(5)
                found = what()
                if found:
                    return found
                raise AssertionError(f"it ended with {self._process.returncode}:\n{self.log}")
            time.sleep(0.02)
        raise AssertionError(f"waited for {patience_s} s in vain:\n{self.log}")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_ended(self) -> int:
        """Its exit code."""
        code = self._process.wait(PATIENCE_S)
        self._reader.join(5)
        return code

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait_ended()

    def close(self) -> None:
        """Ends it, however it is."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(5)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def http(self) -> httpx.Client:
        """A client of it."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False)


def curl_parts(command: str) -> tuple[str, dict[str, str], str | None]:
    """(path, headers, body) of a curl."""
    words = shlex.split(command)[1:]
    (url,) = (word for word in words if word.startswith(ADDRESS))
    headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
    bodies = [words[i + 1] for i, word in enumerate(words) if word == "-d"]
    return url.removeprefix(ADDRESS), headers, bodies[0] if bodies else None
