"""Requests through Prism, which holds what goes in and what comes out against OpenAI's description.

Run by `scripts/run_clients` with the project's Python; JAXSERVE_CLIENT is the folder of Prism. A reply that
is not as described comes out as an error of Prism's own. Prism reads a reply to its end before it passes
it on, and does not look into streams; their chunks are held against the description by the tests.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.clients.checks import CHAT, TOOL, equal, require, run_checks, server_of_arguments

SERVER = server_of_arguments()
DESCRIPTION = Path(__file__).parent / "data" / "openai_api.json"
PRISM = Path(os.environ["JAXSERVE_CLIENT"]) / "node_modules" / ".bin" / "prism"
START_S = 60
BASE = {"model": SERVER.model, "temperature": 0, "seed": 3}
ANSWER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}


@contextlib.contextmanager
def proxy(description: Path, upstream: str) -> Iterator[str]:
    """The address of a Prism between us and the server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(PRISM), "proxy", str(description), upstream, "--errors"]
    process = subprocess.Popen(
        [*command, f"--port={port}", "--host=127.0.0.1"],
        stdout=sys.stderr,
        stderr=sys.stderr,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            require(process.poll() is None, f"prism ended with {process.returncode}")
            require(time.monotonic() < deadline, f"prism is not there after {START_S} s")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """(status, JSON)."""
    headers = {"Authorization": f"Bearer {SERVER.key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def accepted(path: str, body: dict[str, Any] | None = None) -> Any:
    """A reply that Prism found nothing against."""
    status, reply = ask(f"{ADDRESS}{path}", body)
    require(status == 200, f"{path} {body}: {status} {json.dumps(reply)[:800]}")
    return reply


def models() -> None:
    accepted("/models")
    accepted(f"/models/{SERVER.model}")


def completions() -> None:
    body = {**BASE, "prompt": "hello", "max_tokens": 6}
    for more in (
        {},
        {"logprobs": 3},
        {
            "echo": True
        },  # with logprobs the first is null, as OpenAI gives it and does not describe it
        {"n": 2, "stop": ["a", "b"], "temperature": 1},
        {"prompt": ["one", "two"], "logprobs": 0},
        {"prompt": [1, 2, 3], "logit_bias": {"5": 2}, "presence_penalty": 1, "user": "u"},
    ):
        accepted("/completions", body | more)


def chat() -> None:
    body = {**BASE, "messages": CHAT, "max_completion_tokens": 6}
    for more in (
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"n": 2, "stop": "a", "temperature": 1, "metadata": {"a": "b"}},
        {"response_format": {"type": "json_object"}, "max_completion_tokens": 30},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": ANSWER, "strict": True},
            },
            "max_completion_tokens": 30,
        },
    ):
        accepted("/chat/completions", body | more)


def tools() -> None:
    body = {**BASE, "messages": CHAT, "tools": [TOOL], "max_completion_tokens": 80}
    named = {"type": "function", "function": {"name": "get_weather"}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named]},
    }
    for choice in ("auto", "none", "required", named, allowed):
        reply = accepted("/chat/completions", body | {"tool_choice": choice})
    (call, *_) = reply["choices"][0]["message"]["tool_calls"]
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "-3 degrees"},
    ]
    accepted("/chat/completions", body | {"messages": messages})


def a_reply_that_is_not_as_described_is_found() -> None:
    """The control: with a description that asks for more, the same reply is refused."""
    changed = json.loads(DESCRIPTION.read_text("utf-8"))
    schema = changed["components"]["schemas"]["CreateCompletionResponse"]
    schema["required"] = [*schema["required"], "what_nobody_gives"]
    path = Path(os.environ["JAXSERVE_CLIENT"]) / "control.json"
    path.write_text(json.dumps(changed), "utf-8")
    with proxy(path, SERVER.base_url) as address:
        body = {**BASE, "prompt": "hello", "max_tokens": 2}
        status, reply = ask(f"{address}/completions", body)
    equal(status, 500, "status")
    require("what_nobody_gives" in json.dumps(reply), f"{reply}")


with proxy(DESCRIPTION, SERVER.base_url) as ADDRESS:
    run_checks(
        {
            f.__name__: f
            for f in (models, completions, chat, tools, a_reply_that_is_not_as_described_is_found)
        }
    )
