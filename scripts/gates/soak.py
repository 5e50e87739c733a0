"""Gate: a long mixed load with clients that leave takes no more memory and no more descriptors in time."""

import asyncio
import statistics
import time
from collections.abc import Sequence

import numpy as np

from scripts.gates.aborts import FLAGS, NUM_PAGES, num_leaked
from scripts.gates.checks import Check, Options
from scripts.gates.server import TINY, Server, wait_idle
from scripts.gates.traffic import PHASES, Tally, send_and_leave

NUM_CLIENTS = 12
_SHARES = (0.02, 0.03, 0.1, 0.05, 0.1, 0.7)  # of PHASES
_SLACK_SHARE, _SLACK_BYTES, _SLACK_DESCRIPTORS = 0.02, 4 * 2**20, 8
_SAMPLES = 240


def run(options: Options) -> list[Check]:
    """Runs it."""
    with Server(TINY, *FLAGS, log=options.folder / "soak.log") as server:
        return asyncio.run(_soak(server, options))


async def _soak(server: Server, options: Options) -> list[Check]:
    seconds, tally = 60 * options.minutes, Tally()
    end = time.monotonic() + seconds
    samples: list[tuple[float, int, int]] = []

    async def client(number: int) -> None:
        rng = np.random.default_rng([options.seed, number])
        http = server.http()
        while time.monotonic() < end:
            phase = PHASES[rng.choice(len(PHASES), p=_SHARES)]
            await send_and_leave(http, rng, phase, tally)
        await http.close()

    async def watch() -> None:
        while (now := time.monotonic()) < end:
            samples.append((now, server.rss_bytes(), server.num_descriptors()))
            await asyncio.sleep(seconds / _SAMPLES)

    await asyncio.gather(watch(), *(client(number) for number in range(NUM_CLIENTS)))
    http = server.http()
    found, _ = await wait_idle(http)
    await http.close()
    return _checks(samples, tally, num_leaked(found, NUM_PAGES), options.minutes)


def _checks(
    samples: list[tuple[float, int, int]], tally: Tally, leaked: float, minutes: float
) -> list[Check]:
    rss, slope = drift([(at, memory) for at, memory, _ in samples])
    descriptors, _ = drift([(at, count) for at, _, count in samples])
    early = statistics.median(memory for _, memory, _ in samples[: len(samples) // 2])
    slack = _SLACK_BYTES + _SLACK_SHARE * early
    num_requests = sum(tally.phases.values())
    early_s, late_s = p99s(tally.ended_s)
    rows = [
        (
            f"memory, last quarter against the second, {minutes:g} minutes",
            f"{rss / 2**20:+.1f} MiB of {early / 2**20:.0f} ({60 * slope / 2**20:+.2f} MiB a minute)",
            f"<= {slack / 2**20:.1f} MiB",
            rss <= slack,
        ),
        (
            "descriptors, the same",
            f"{descriptors:+.0f}",
            f"<= {_SLACK_DESCRIPTORS}",
            descriptors <= _SLACK_DESCRIPTORS,
        ),
        ("pages leaked", f"{leaked:.0f}", "0", leaked == 0),
        (
            "faults",
            f"{len(tally.faults)} of {num_requests} requests (p99 {early_s:.2f}, then {late_s:.2f} s)",
            "0",
            not tally.faults,
        ),
    ]
    return [
        Check(
            gate="soak",
            what=what,
            found=text,
            wanted=wanted,
            passed=passed,
            detail="; ".join(tally.faults[:3]) if what == "faults" else "",
        )
        for what, text, wanted, passed in rows
    ]


def drift(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """(median of the last quarter - median of the second one, slope of a line through the last three
    quarters, a second). The first quarter is left out: caches fill.

    Args:
        samples: (time, value), at least 8.
    """
    quarter = len(samples) // 4
    values = [value for _, value in samples]
    kept = np.asarray(samples[quarter:], float)
    slope = float(np.polyfit(kept[:, 0] - kept[0, 0], kept[:, 1], 1)[0])
    last, second = values[-quarter:], values[quarter : 2 * quarter]
    return statistics.median(last) - statistics.median(second), slope


def p99s(seconds: Sequence[float]) -> tuple[float, float]:
    """99th percentiles of the second and of the last third of what took so long."""
    third = len(seconds) // 3
    if not third:
        return float("nan"), float("nan")
    return (
        float(np.percentile(seconds[third : 2 * third], 99)),
        float(np.percentile(seconds[-third:], 99)),
    )
