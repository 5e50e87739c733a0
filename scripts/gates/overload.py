"""Gate: four times the load that a server can bear costs it a tenth of its goodput at most, and no memory.

    warm up | peak: as many clients as it takes, each sends when its last answer came
            | overload: OVERLOAD times that rate for a while, whatever comes back
            | peak again

All count answers within one limit on their latency, in the middle part of their time.
"""

import asyncio

import numpy as np

from jaxserve.server.load.arrivals import arrival_times
from jaxserve.server.load.client import LoadClient, Target
from jaxserve.server.load.records import LoadRequest, RequestRecord
from jaxserve.server.load.run_load import LoadResult, run_load
from scripts.gates.checks import Check, Options
from scripts.gates.server import FEW_SHAPES, NUM_SLOTS, TINY, Server

OVERLOAD, LEAST_SHARE, SECONDS = 4.0, 0.9, 20.0
SLOTS, QUEUE = NUM_SLOTS, 32
INPUT_LEN, OUTPUT_LEN = 32, 96
SLACK_BYTES, SLACK_SHARE = 16 * 2**20, 0.03
FLAGS = (
    *FEW_SHAPES,
    f"--max_queue_requests={QUEUE}",
    "--max_model_len=256",
    "--page_size=16",
    "--num_pages=400",
)


def run(options: Options) -> list[Check]:
    """Runs it."""
    with Server(TINY, *FLAGS, log=options.folder / "overload.log") as server:
        return asyncio.run(_overload(server, options))


async def _overload(server: Server, options: Options) -> list[Check]:
    client = LoadClient(Target(base_url=server.url, model=TINY.name, request_timeout_s=60))
    rng = np.random.default_rng(options.seed)

    async def load(count: int, rate: float, clients: int | None) -> LoadResult:
        return await run_load(
            client.send,
            _requests(rng, count),
            arrival_times(rng, count, rate),
            max_concurrency=clients,
            deadline_s=4 * SECONDS,
        )

    warm = await load(10 * SLOTS, np.inf, SLOTS + QUEUE)
    rate = 10 * SLOTS / warm.duration_s
    peak = await load(max(SLOTS + QUEUE, int(rate * SECONDS)), np.inf, SLOTS + QUEUE)
    peak_rate = middle_rate(peak, np.inf)
    # What a request waits for when the queue is full, twice.
    limit_s = 2 * (SLOTS + QUEUE) / peak_rate
    before = server.rss_bytes()
    over = await load(int(OVERLOAD * peak_rate * SECONDS), OVERLOAD * peak_rate, None)
    await asyncio.sleep(1)
    grown = server.rss_bytes() - before
    # Once more: a machine with other work changes its speed meanwhile.
    again = await load(max(SLOTS + QUEUE, int(rate * SECONDS)), np.inf, SLOTS + QUEUE)
    await client.close()
    at_peak = (middle_rate(peak, limit_s) + middle_rate(again, limit_s)) / 2
    return _checks(over, at_peak, middle_rate(over, limit_s), limit_s, grown, before)


def _checks(
    over: LoadResult, at_peak: float, goodput: float, limit_s: float, grown: int, before: int
) -> list[Check]:
    share = goodput / at_peak
    num_refused = sum(one.failure == "http_429" for one in over.records)
    others = [one for one in over.records if one.failure not in (None, "http_429")]
    slack = SLACK_BYTES + SLACK_SHARE * before
    late = float(np.percentile(over.lateness_s, 99))
    rows = [
        (
            f"goodput at {OVERLOAD:g} times the peak of {at_peak:.1f} requests/s (within {limit_s:.1f} s)",
            f"{100 * share:.0f} % ({goodput:.1f}; client {1e3 * late:.0f} ms late)",
            f">= {100 * LEAST_SHARE:.0f} %",
            share >= LEAST_SHARE,
            "",
        ),
        ("refused with 429", f"{num_refused} of {len(over.records)}", "some", num_refused > 0, ""),
        (
            "other failures",
            f"{len(others)}",
            "0",
            not others,
            "; ".join(f"{one.failure}: {one.detail}" for one in others[:3]),
        ),
        (
            "memory that grew",
            f"{grown / 2**20:.1f} MiB of {before / 2**20:.0f}",
            f"<= {slack / 2**20:.1f} MiB",
            grown <= slack,
            "",
        ),
    ]
    return [
        Check(gate="overload", what=what, found=found, wanted=wanted, passed=ok, detail=detail)
        for what, found, wanted, ok, detail in rows
    ]


def _requests(rng: np.random.Generator, count: int) -> list[LoadRequest]:
    return [
        LoadRequest(
            body={
                "prompt": rng.integers(3, 512, INPUT_LEN).tolist(),
                "max_tokens": OUTPUT_LEN,
                "temperature": 0,
                "ignore_eos": True,
            },
            num_prompt_tokens=INPUT_LEN,
        )
        for _ in range(count)
    ]


def middle_rate(load: LoadResult, limit_s: float) -> float:
    """Answers a second within a limit, in the part of the load that neither fills nor drains the queue:
    from a fifth of the sending time to its end.

    Args:
        load: what was measured.
        limit_s: on the latency of an answer; inf = any.
    """
    end = max(one.sent_s for one in load.records)
    begin = 0.2 * end
    count = sum(_is_within(one, begin, end, limit_s) for one in load.records)
    return count / (end - begin)


def _is_within(one: RequestRecord, begin: float, end: float, limit_s: float) -> bool:
    return (
        one.is_good
        and one.ended_s is not None
        and begin <= one.ended_s <= end
        and one.e2el_s <= limit_s
    )
