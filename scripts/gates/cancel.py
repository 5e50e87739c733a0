"""Gate: 200 long requests that are cancelled do not hold up the one that comes after them.

Source: vLLM's end-to-end test of cancelled requests (shutdown and basic tests of its HTTP server).
"""

import asyncio
import json
import time

from jaxserve.server.load.http_client import HttpClient, HttpError
from scripts.gates.checks import Check, Options
from scripts.gates.server import FEW_SHAPES, OWNED, TINY, Server, wait_idle
from scripts.gates.traffic import answer_of

NUM_REQUESTS, NUM_TOKENS, PATIENCE_S, LIMIT_S = 200, 10_000, 0.5, 5.0


def run(options: Options) -> list[Check]:
    """Runs it."""
    with Server(TINY, *FEW_SHAPES, log=options.folder / "cancel.log") as server:
        return asyncio.run(_cancel(server))


async def _cancel(server: Server) -> list[Check]:
    http = server.http()
    endings = await asyncio.gather(*(_give_up(http, i) for i in range(NUM_REQUESTS)))
    others = [one for one in endings if one]
    begin = time.monotonic()
    try:
        text = await asyncio.wait_for(answer_of(http, [5, 6, 7], 10), 60)
    except (HttpError, TimeoutError) as error:
        text, others = "", [*others, repr(error)]
    seconds = time.monotonic() - begin
    found, waited = await wait_idle(http)
    await http.close()
    return [
        Check(
            gate="cancel",
            what=f"requests of {NUM_TOKENS} tokens cancelled after {PATIENCE_S} s",
            found=f"{endings.count(None)}",
            wanted=f"{NUM_REQUESTS}",
            passed=endings.count(None) == NUM_REQUESTS,
            detail="; ".join(others[:3]),
        ),
        Check(
            gate="cancel",
            what="10 tokens right after them",
            found=f"{seconds:.2f} s",
            wanted=f"< {LIMIT_S:g} s",
            passed=seconds < LIMIT_S and bool(text),
        ),
        Check(
            gate="cancel",
            what="pages that are still owned",
            found=f"{found[OWNED]:.0f} ({waited:.2f} s later)",
            wanted="0",
            passed=found[OWNED] == 0,
        ),
    ]


async def _give_up(http: HttpClient, index: int) -> str | None:
    """None if the client was the one that ended it, else what it got."""
    # A prompt of its own: otherwise a prefix would be waited for.
    body = {
        "prompt": [3 + index % 500, 4 + index // 2, 7],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": index % 2 == 0,
    }
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            http.request("POST", "/v1/completions", body=json.dumps(body).encode()) as response,
        ):
            answer = await response.read()
            return f"{response.status}: {answer[:200]!r}"
    except TimeoutError:
        return None
    except HttpError as error:
        return f"{error.kind}: {error}"
