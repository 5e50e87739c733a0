"""Gate: thousands of clients that leave at every moment leave no page and no sequence behind."""

import asyncio

import numpy as np

from jaxserve.server.load.http_client import HttpError
from scripts.gates.checks import Check, Options
from scripts.gates.server import FEW_SHAPES, RUNNING, TINY, WAITING, Server, gauges, wait_idle
from scripts.gates.traffic import MAX_MODEL_LEN, PHASES, Tally, answer_of, send_and_leave

NUM_CLIENTS = 48
NUM_PAGES = 61  # few enough that requests are preempted
PREEMPTIONS = "jaxserve:num_preemptions_total"
_PROMPT = [7, 8, 9, 10, 11]
_SHARES = (0.1, 0.15, 0.3, 0.15, 0.25, 0.05)  # of PHASES
FLAGS = (
    *FEW_SHAPES,
    f"--max_model_len={MAX_MODEL_LEN}",
    "--page_size=16",
    f"--num_pages={NUM_PAGES}",
    "--max_queue_requests=1000",
)


def run(options: Options) -> list[Check]:
    """Runs it."""
    with Server(TINY, *FLAGS, log=options.folder / "aborts.log") as server:
        return asyncio.run(_abort(server, options))


async def _abort(server: Server, options: Options) -> list[Check]:
    http = server.http()
    tally, most_waiting = Tally(), 0.0
    before = await answer_of(http, _PROMPT, 40)
    left = iter(range(options.num_aborts))

    async def client(number: int) -> None:
        nonlocal most_waiting
        rng = np.random.default_rng([options.seed, number])
        own = server.http()
        for index in left:
            phase = PHASES[rng.choice(len(PHASES), p=_SHARES)]
            await send_and_leave(own, rng, phase, tally)
            if index % 100 == 0:
                most_waiting = max(most_waiting, (await gauges(own))[WAITING])
        await own.close()

    await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
    found, waited = await wait_idle(http)
    try:
        after = await asyncio.wait_for(answer_of(http, _PROMPT, 40), 30)
    except (HttpError, TimeoutError) as error:
        after = f"no answer: {error!r}"
    await http.close()
    return _checks(tally, found, waited, most_waiting, same=before == after)


def _checks(
    tally: Tally, found: dict[str, float], waited: float, most_waiting: float, *, same: bool
) -> list[Check]:
    num_aborts = sum(tally.phases.values()) - tally.phases["at the end"]
    leaked = num_leaked(found, NUM_PAGES)
    num_left = found[RUNNING] + found[WAITING]
    num_preempted = found.get(PREEMPTIONS, 0)
    is_covered = all(tally.phases.values()) and most_waiting > 0 and num_preempted > 0
    rows = [
        (
            f"pages leaked over {num_aborts} aborts",
            f"{leaked:.0f} ({waited:.2f} s after the last)",
            "0",
            leaked == 0,
        ),
        ("sequences left", f"{num_left:.0f}", "0", num_left == 0),
        (
            "left while queued, preempted or running",
            f"up to {most_waiting:.0f} waiting, {num_preempted:.0f} preemptions",
            "some of each",
            is_covered,
        ),
        (
            "answers of 500 and above",
            f"{tally.num_server_errors}",
            "0",
            not tally.num_server_errors,
        ),
        ("other faults", f"{len(tally.faults)}", "0", not tally.faults),
        ("a greedy answer before and after", "the same" if same else "changed", "the same", same),
    ]
    faults = "; ".join(tally.faults[:3])
    return [
        Check(
            gate="aborts",
            what=what,
            found=text,
            wanted=wanted,
            passed=passed,
            detail=faults if what == "other faults" else "",
        )
        for what, text, wanted, passed in rows
    ]


def num_leaked(found: dict[str, float], num_pages: int) -> float:
    """Pages that are neither free nor cached while nothing runs; the null page is neither."""
    states = {name: x for name, x in found.items() if name.startswith("jaxserve:pages{")}
    known = sum(x for name, x in states.items() if '"free"' in name or '"cached"' in name)
    return num_pages - 1 - known
