"""Gate: no hostile request makes the server fail, hang or tell of its inside.

`scripts/server_gates --gates=fuzz --case=N` sends one case alone and shows it.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from jaxserve.server.load.http_client import HttpClient, HttpError
from scripts.gates.checks import Check, Options
from scripts.gates.fuzz_cases import MAX_MODEL_LEN, Case, make_case
from scripts.gates.server import FEW_SHAPES, RUNNING, TINY, WAITING, Server, wait_idle

NUM_CLIENTS = 8
LIMIT_S = 60.0  # a case that asks for many long outputs takes a while; nothing may take longer
_INSIDE = (
    b"Traceback",
    b"site-packages",
    b'File "',
    b" object at 0x",
    bytes(Path(__file__).parents[2]),
)
FLAGS = (
    *FEW_SHAPES,
    f"--max_model_len={MAX_MODEL_LEN}",
    "--page_size=16",
    "--num_pages=300",
)


def run(options: Options) -> list[Check]:
    """Runs it."""
    with Server(TINY, *FLAGS, log=options.folder / "fuzz.log") as server:
        return asyncio.run(_fuzz(server, options))


async def _fuzz(server: Server, options: Options) -> list[Check]:
    statuses: Counter[int] = Counter()
    errors: list[str] = []  # of the server
    faults: list[str] = []  # others
    left: Iterator[int] = iter(range(options.num_cases))

    async def client() -> None:
        http = server.http()
        for number in left:
            case = make_case(options.seed, number)
            status, fault = await send(http, case)
            statuses[status] += 1
            if fault:
                kept = errors if status >= 500 else faults
                kept.append(f"case {number}: {fault}: {show(case)}")
        await http.close()

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    http = server.http()
    found, _ = await wait_idle(http)
    await http.close()
    answered = sum(count for status, count in statuses.items() if status)
    shown = ", ".join(f"{status or 'none'}: {count}" for status, count in sorted(statuses.items()))
    logged = re.findall(r"Traceback.*(?:\n[ ].*)*\n(\S.*)", server.said())
    num_left = found[RUNNING] + found[WAITING]
    return [
        _check("answers of 500 and above", len(errors), errors, f" of {answered} ({shown})"),
        _check("answers that are late, no JSON or tell too much", len(faults), faults),
        _check("requests left", int(num_left), []),
        _check("tracebacks in the log", len(logged), logged),
    ]


def _check(what: str, count: int, faults: list[str], more: str = "") -> Check:
    detail = "; ".join(faults[:5]) if count else ""
    return Check(
        gate="fuzz", what=what, found=f"{count}{more}", wanted="0", passed=count == 0, detail=detail
    )


async def send(http: HttpClient, case: Case) -> tuple[int, str | None]:
    """(status, or 0 where there was none; what is wrong with the answer)."""
    try:
        async with (
            asyncio.timeout(LIMIT_S),
            http.request(case.method, case.path, body=case.body, headers=case.headers) as response,
        ):
            body = await response.read(2**26)
    except TimeoutError:
        return 0, f"no answer within {LIMIT_S:g} s"
    except HttpError as error:
        return 0, f"{error.kind}: {error}"
    kind = response.headers.get("content-type", "")
    return response.status, _fault(case.method, response.status, kind, body)


def _fault(method: str, status: int, kind: str, body: bytes) -> str | None:
    if status >= 500:
        return f"status {status}: {body[:300]!r}"
    if status == 422:
        return "status 422, which OpenAI's API never has"
    if any(word in body for word in _INSIDE):
        return f"tells of its inside: {body[:500]!r}"
    if kind.startswith("text/event-stream"):
        # A dead end of the request's own constraints is told so; anything else is the server's fault.
        if b'"error":' in body and b'"type":"invalid_request_error"' not in body:
            return f"an error within a stream: {body[-300:]!r}"
        return (
            None if body.endswith(b"data: [DONE]\n\n") else f"a stream without end: {body[-99:]!r}"
        )
    # What is no HTTP is refused before anything reads routes, in plain text.
    if status >= 400 and method != "HEAD" and kind.startswith("application/json"):
        return _fault_of_error(body)
    return None


def _fault_of_error(body: bytes) -> str | None:
    try:
        error = json.loads(body)["error"]
        missing = {"message", "type", "param", "code"} - set(error)
    except (ValueError, LookupError, TypeError):
        return f"an error that is no error object: {body[:200]!r}"
    return f"an error without {missing}: {body[:200]!r}" if missing else None


def show(case: Case) -> str:
    """A case, short enough to be read."""
    body = b"" if case.body is None else case.body
    return f"{case.method} {case.path[:100]} {str(case.headers)[:200]} {body[:400]!r}"
