"""A whole server process over a fake engine: `python -m tests.server.fake_server '{"config": {...}, ...}'`.

For tests of what a process does: signals, sockets, exit codes. Starts in half a second, compiles nothing.
SIGUSR1 makes its engine die, as a killed engine process does.
"""

import asyncio
import json
import signal
import sys

from jaxserve.cli.flags import configure_logging
from jaxserve.server.config import ServerConfig, key_digest
from jaxserve.server.serve import run_server
from tests.server.fake_client import FakeEngineClient


class SlowClient(FakeEngineClient):
    """Takes its time.

    Args:
        start_s: until it is warm.
        step_s: for each step.
        options: of `FakeEngineClient`.
    """

    def __init__(self, *, start_s: float = 0.0, step_s: float = 0.0, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._start_s = start_s
        self._step_s = step_s

    async def start(self) -> None:
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGUSR1, self.fail, "its process was killed"
        )
        await asyncio.sleep(self._start_s)
        await super().start()

    async def pause(self) -> None:
        await asyncio.sleep(self._step_s)


def main() -> int:
    """Runs the server that the first argument describes."""
    given = json.loads(sys.argv[1])
    configure_logging(1)
    fields = {"model": "models/fake", "port": 0} | given.get("config", {})
    fields["api_key_digests"] = [key_digest(key) for key in fields.pop("api_keys", ())]
    config = ServerConfig(**fields)
    return run_server(config, lambda: SlowClient(**given.get("client", {})))


if __name__ == "__main__":
    raise SystemExit(main())
