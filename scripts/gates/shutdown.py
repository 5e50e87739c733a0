"""Gate: SIGTERM ends the server in time, with nothing left; with a grace time, replies come to their end."""

import asyncio
import json
import signal
import socket
import time
from collections import Counter

from jaxserve.server.load.http_client import Address, HttpClient, HttpError
from scripts.gates.checks import Check, Options
from scripts.gates.server import FEW_SHAPES, TINY, Server, wait_let_in

NUM_STREAMS, LIMIT_S, GRACE_S = 24, 4.0, 30
NUM_LONG, NUM_SHORT = 2000, 300  # tokens of a stream; short ones too last until all are let in
FLAGS = (*FEW_SHAPES, "--num_pages=600", "--page_size=16")


def run(options: Options) -> list[Check]:
    """Runs it."""
    checks = []
    with Server(TINY, *FLAGS, log=options.folder / "shutdown_0.log") as server:
        checks += asyncio.run(_at_once(server))
    flags = (*FLAGS, f"--shutdown_timeout={GRACE_S}")
    with Server(TINY, *flags, log=options.folder / "shutdown_30.log") as server:
        checks += asyncio.run(_with_grace(server))
    return checks


async def _at_once(server: Server) -> list[Check]:
    http = server.http()
    streams = [asyncio.create_task(_stream(http, NUM_LONG)) for _ in range(NUM_STREAMS)]
    await wait_let_in(http, NUM_STREAMS)  # some run, the others wait
    num_processes = len(server.pids())  # from here on they are known
    code, seconds = await asyncio.to_thread(server.stop)
    endings = await asyncio.wait_for(asyncio.gather(*streams), 30)
    await asyncio.sleep(0.2)
    left = server.pids()
    rows = [
        (
            f"SIGTERM with {NUM_STREAMS} streams under way",
            f"{seconds:.2f} s",
            f"< {LIMIT_S:g} s",
            seconds < LIMIT_S,
        ),
        ("its exit code", f"{code}", "0", code == 0),
        (
            "processes left, port still taken",
            f"{len(left)} of {num_processes}, {_is_taken(server)}",
            "0, False",
            not left and not _is_taken(server),
        ),
        (
            "streams that ended without a word",
            f"{endings.count('nothing')}",
            "0",
            "nothing" not in endings,
        ),
    ]
    return _checks("timeout 0", rows)


async def _with_grace(server: Server) -> list[Check]:
    http = server.http()
    streams = [asyncio.create_task(_stream(http, NUM_SHORT)) for _ in range(NUM_STREAMS)]
    await wait_let_in(http, NUM_STREAMS)
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.05)
    late = await _stream(HttpClient(http.address, keep_alive=False), 5)
    endings = await asyncio.wait_for(asyncio.gather(*streams), GRACE_S + 10)
    code = await asyncio.to_thread(server.process.wait, GRACE_S)
    seconds = time.monotonic() - begin
    refused = late in ("status 503", "refused")
    rows = [
        (
            f"streams of {NUM_SHORT} tokens, all let in before, that ended whole",
            ", ".join(f"{num} {ending}" for ending, num in Counter(endings).items()),
            f"{NUM_STREAMS} done",
            endings.count("done") == NUM_STREAMS,
        ),
        ("a request after SIGTERM", late, "status 503, or refused at the end", refused),
        (
            "exit",
            f"code {code} after {seconds:.2f} s",
            f"0 within {GRACE_S} s",
            code == 0 and seconds < GRACE_S,
        ),
    ]
    return _checks(f"timeout {GRACE_S}", rows)


def _checks(name: str, rows: list[tuple[str, str, str, bool]]) -> list[Check]:
    return [
        Check(gate="shutdown", what=f"{name}: {what}", found=found, wanted=wanted, passed=passed)
        for what, found, wanted, passed in rows
    ]


async def _stream(http: HttpClient, num_tokens: int) -> str:
    """How a stream ended: "done", "aborted" (it says so), "nothing" (cut without a word), a status, or how
    no answer came.
    """
    body = {"prompt": [5, 6, 7], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    said = b""
    try:
        async with http.request(
            "POST", "/v1/completions", body=json.dumps(body).encode()
        ) as response:
            if response.status != 200:
                return f"status {response.status}"
            async for part in response.parts():
                said += part
    except HttpError as error:
        if not said:
            return error.kind
    if b'"finish_reason":"length"' in said.replace(b" ", b"") and b"[DONE]" in said:
        return "done"
    said_so = b'"error"' in said or b'"abort"' in said
    return "aborted" if said_so else "nothing"


def _is_taken(server: Server) -> bool:
    address = Address.parse(server.url)
    with socket.socket() as one:
        return one.connect_ex((address.host, address.port)) == 0
