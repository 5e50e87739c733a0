"""Requests that look like many different users' at once, drawn from a seed; and sending one.

Used by the gates `aborts` and `soak`. They fit tiny_llama with MAX_MODEL_LEN tokens of context.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.server.load.http_client import Address, HttpClient, HttpError

MAX_MODEL_LEN = 512
_VOCABULARY = (3, 512)  # ids of tiny_llama that are no special tokens
_SHARED = [np.random.default_rng(i).integers(*_VOCABULARY, 96).tolist() for i in range(4)]
_CONSTRAINTS = (
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    {"structured_outputs": {"regex": "[a-f0-9]{4,12}"}},
    {"response_format": {"type": "json_object"}},
    {"stop": ["e", "zz"], "min_tokens": 2},
)
_WORDS = ("some", "words", "to", "begin", "with")
# When a client leaves: before its body is sent, without waiting for an answer, after a short time, after
# the first part of an answer, after some, or not at all.
PHASES = ("half a body", "at once", "soon", "first part", "some parts", "at the end")


@dataclass(kw_only=True)
class Tally:
    """What became of the requests.

    Args:
        phases: how many clients left when.
        statuses: answers by status.
        faults: what may not happen, in words.
        ended_s: how long the requests took that were answered to their end.
    """

    phases: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    statuses: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)

    @property
    def num_server_errors(self) -> int:
        """Answers of 500 and above."""
        return sum(count for status, count in self.statuses.items() if status >= 500)


def draw_request(rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    """(route, body) of a request."""
    length = int(rng.integers(1, 200))
    prompt = rng.integers(*_VOCABULARY, length).tolist()
    if rng.random() < 0.4:
        prompt = _SHARED[rng.integers(4)][: int(rng.integers(16, 97))] + prompt[:32]
    body: dict[str, Any] = {
        "max_tokens": int(rng.integers(3, 160)),
        "temperature": float(rng.choice([0.0, 1.0])),
        "stream": bool(rng.random() < 0.7),
        "ignore_eos": bool(rng.random() < 0.5),
    }
    if rng.random() < 0.3:
        body |= {"n": int(rng.integers(2, 5)), "temperature": 1.0}
    if rng.random() < 0.2:
        body["cache_salt"] = f"salt {rng.integers(3)}"
    if rng.random() < 0.25:
        body |= _CONSTRAINTS[rng.integers(len(_CONSTRAINTS))] | {"ignore_eos": False}
    if rng.random() < 0.3:
        words = " ".join(_WORDS[: int(rng.integers(1, 6))])
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}
    if rng.random() < 0.2:
        body["logprobs"] = 2
    if rng.random() < 0.15:
        return "/v1/completions", body | {"prompt": [prompt, prompt[: len(prompt) // 2 + 1]]}
    return "/v1/completions", body | {"prompt": prompt}


async def send_and_leave(
    http: HttpClient, rng: np.random.Generator, phase: str, tally: Tally, *, limit_s: float = 60.0
) -> None:
    """Sends one request and leaves in a phase; whatever happens is tallied, nothing is raised."""
    route, body = draw_request(rng)
    data = json.dumps(body).encode()
    tally.phases[phase] += 1
    try:
        if phase in ("half a body", "at once"):
            sent = len(data) // 2 if phase == "half a body" else len(data)
            await _write_and_close(http.address, route, data, sent)
            return
        patience_s = float(rng.exponential(0.08)) if phase == "soon" else limit_s
        async with asyncio.timeout(patience_s):
            await _read_parts(http, route, data, _num_parts(rng, phase), tally)
    except TimeoutError:
        if phase != "soon":
            tally.faults.append(f"no end after {limit_s:g} s: {route} {data[:300]!r}")
    except HttpError as error:
        tally.faults.append(f"{error.kind}: {error}: {route} {data[:300]!r}")


def _num_parts(rng: np.random.Generator, phase: str) -> int | None:
    """After how many parts of the answer the client leaves; None = when it has all."""
    return {"first part": 1, "some parts": int(rng.integers(2, 30))}.get(phase)


async def _read_parts(
    http: HttpClient, route: str, data: bytes, num_parts: int | None, tally: Tally
) -> None:
    begin = asyncio.get_running_loop().time()
    async with http.request("POST", route, body=data) as response:
        tally.statuses[response.status] = tally.statuses.get(response.status, 0) + 1
        seen, last = 0, b""
        async for part in response.parts():
            seen, last = seen + 1, part
            if seen == num_parts and response.status == 200:
                return
    if response.status >= 400:
        tally.faults.append(f"status {response.status}: {last[:300]!r}: {route} {data[:300]!r}")
    elif b'"error":' in last:
        tally.faults.append(f"an error within the answer: {last[:300]!r}: {route} {data[:300]!r}")
    else:
        tally.ended_s.append(asyncio.get_running_loop().time() - begin)


async def _write_and_close(address: Address, route: str, data: bytes, sent: int) -> None:
    """Sends the first `sent` bytes of a body and closes the connection."""
    head = f"POST {route} HTTP/1.1\r\nhost: {address.host_header}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(head.encode() + data[:sent])
        await writer.drain()
        writer.close()
        await writer.wait_closed()


async def answer_of(http: HttpClient, prompt: list[int], max_tokens: int) -> str:
    """The greedy output of a prompt.

    Raises:
        HttpError: there is none.
    """
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body).encode()
    async with http.request("POST", "/v1/completions", body=data) as response:
        answer = await response.read()
    if response.status != 200:
        raise HttpError("status", f"status {response.status}: {answer[:300]!r}")
    return str(json.loads(answer)["choices"][0]["text"])
