"""`Stream`: a streamed completion that a thread reads, while the test does something else to the server."""

import json
import threading

import httpx

from tests.server.processes import ServerProcess

LONG = {
    "prompt": "hi",
    "max_tokens": 200,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


class Stream:
    """A streamed completion that a thread reads."""

    def __init__(self, server: ServerProcess, **fields: object) -> None:
        self.server = server
        self.status = 0
        self.events: list[str] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(LONG | fields,), daemon=True)
        self._thread.start()

    def _read(self, body: dict) -> None:
        try:
            with (
                self.server.http() as http,
                http.stream("POST", "/v1/completions", json=body) as reply,
            ):
                self.status = reply.status_code
                for line in reply.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = error

    def wait_begun(self) -> "Stream":
        self.server.wait_until(lambda: self.events)
        return self

    def wait_ended(self) -> "Stream":
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.error is None, self.error
        return self

    @property
    def num_tokens(self) -> int:
        """How many token ids came, where they were asked for by `return_token_ids`."""
        chunks = [json.loads(event) for event in self.events[:-1]]
        return sum(len(c["choices"][0].get("token_ids") or ()) for c in chunks if c["choices"])

    @property
    def text(self) -> str:
        """Of choice 0."""
        return "".join(json.loads(e)["choices"][0]["text"] for e in self.events[:-1])
