"""`jaxserve bench capacity`: the highest request rate at which a running server keeps its promises.

Called by `bench.py`. Invariant: probes do not help each other: each draws prompts of its own and has a
cache_salt of its own, and begins when no request of the one before is left.
"""

import asyncio
import datetime
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from jaxserve import __version__
from jaxserve.cli.arguments import UsageError
from jaxserve.cli.bench_result import check_output, write_result
from jaxserve.cli.bench_serve import client_figures, warm_up
from jaxserve.cli.command_line import read_command_line
from jaxserve.cli.flag_types import define_float, define_integer
from jaxserve.cli.flags import configure_logging, define_general
from jaxserve.cli.load_flags import (
    Dataset,
    define_dataset,
    define_target,
    read_target,
    require,
    with_salt,
)
from jaxserve.cli.stop_signals import StopSignals
from jaxserve.server.load.capacity import (
    Capacity,
    Objective,
    Probe,
    SearchLimits,
    find_capacity,
    judge,
)
from jaxserve.server.load.client import LoadClient, Target
from jaxserve.server.load.figures import PERCENTILES, load_figures
from jaxserve.server.load.run_load import LoadResult, run_load

USAGE = """\
usage: jaxserve bench capacity --slo=p99_ttft:1000,p99_itl:100 [flags]

Finds the highest request rate at which a running server keeps every limit of --slo: doubles the rate until
one is broken, halves it while none is kept, then bisects. A probe sends requests for --probe_s seconds at
one rate (at least --min_prompts), waits up to --drain_s for those that are left, and fails where a limit is
broken over all requests due after the warm-up or over the later half of them, or where more than
--max_failed_share have no answer. Prints one JSON object: request_rate (null: no rate passed), failed_rate
(the lowest that failed; null: none), ended_by, and every probe with its figures, as `jaxserve bench serve`
has them. Stopped by a signal after a probe, it gives what is known, with "ended_by": "stopped".
exit code: 0 found, 1 no rate passed, 2 could not be measured, 130 or 143 stopped by SIGINT or SIGTERM
"""
logger = logging.getLogger("jaxserve.cli")


def capacity_flags() -> flags.FlagValues:
    """The flags of `bench capacity`."""
    default = SearchLimits()
    values = flags.FlagValues()
    group: dict[str, Any] = {"flag_values": values, "module_name": "search"}
    flags.DEFINE_list(
        "slo",
        None,
        "Limits in milliseconds: mean, median or a percentile of ttft, tpot, itl or e2el.",
        **group,
    )
    define_float("start_rate", default.start_rate, "First rate, requests a second.", **group)
    define_float("min_rate", default.min_rate, "No rate below is probed.", **group)
    define_float("max_rate", default.max_rate, "No rate above is probed.", **group)
    define_float(
        "tolerance",
        default.tolerance,
        "Ends when the lowest rate that failed is at most this share above the best that passed.",
        **group,
    )
    define_integer("max_probes", default.max_probes, "Most probes.", lower_bound=1, **group)
    define_float("probe_s", 30.0, "Seconds over which a probe's requests are due.", **group)
    define_integer("min_prompts", 20, "Fewest requests of a probe.", lower_bound=2, **group)
    define_float("warmup_share", 0.1, "Of that time, whose requests are not judged.", **group)
    define_float(
        "drain_s", 30.0, "Requests under way this long after the last are cut off.", **group
    )
    define_float("max_failed_share", 0.0, "Of requests that may have no answer.", **group)
    flags.DEFINE_string("output", None, "Write the JSON object to this file as well.", **group)
    define_target(values)
    define_dataset(values)
    define_general(values)
    return values


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0; 1 where no rate passed; 130 or 143 where a signal ended the search.

    Raises:
        JaxserveError: it could not be measured.
    """
    given = read_command_line(argv, capacity_flags(), USAGE, needed=("slo",))
    if given is None:
        return 0
    target = read_target(given)
    objectives, limits = _objectives(given), _limits(given)
    dataset = Dataset(given)
    check_output(given["output"])
    configure_logging(given["verbosity"])
    with StopSignals("before a rate was probed: there is no result") as stop:
        prober = _Prober(given, target, dataset, objectives)
        asyncio.run(prober.prepare())

        def measure(rate: float) -> Probe:
            probe = asyncio.run(prober.probe(rate))
            stop.defer()  # from here on there is something to keep
            return probe

        found = find_capacity(measure, limits, lambda: stop.requested)
        write_result(_result(given, prober.model, dataset, objectives, found), given["output"])
    if found.ended_by == "stopped":
        return stop.exit_code
    return 1 if found.request_rate is None else 0


def _objectives(given: dict[str, Any]) -> list[Objective]:
    try:
        return [Objective.parse(text) for text in given["slo"]]
    except ValueError as error:
        raise UsageError(f"--slo={','.join(given['slo'])}: {error}") from None


def _limits(given: dict[str, Any]) -> SearchLimits:
    """The search's limits, and the probe's flags checked."""
    for name in ("start_rate", "min_rate", "max_rate", "tolerance", "probe_s"):
        require(0 < given[name] < math.inf, given, name, "a number above 0")
    require(given["drain_s"] >= 0, given, "drain_s", "at least 0")
    for name in ("warmup_share", "max_failed_share"):
        require(0 <= given[name] < 1, given, name, "in [0, 1)")
    require(given["max_rate"] >= given["min_rate"], given, "max_rate", "at least --min_rate")
    names = ("start_rate", "min_rate", "max_rate", "tolerance", "max_probes")
    return SearchLimits(**{name: given[name] for name in names})


class _Prober:
    """Measures one rate after the other."""

    def __init__(
        self,
        given: dict[str, Any],
        target: Target,
        dataset: Dataset,
        objectives: Sequence[Objective],
    ):
        self.model = ""
        self._num_probes = 0
        self._given = given
        self._target = target
        self._dataset = dataset
        self._objectives = objectives

    async def prepare(self) -> None:
        """Asks for the model's name, and sends one request.

        Raises:
            ServerError: there is no answer.
        """
        client = LoadClient(with_salt(self._target, self._given))
        try:
            self.model = await client.find_model()
            await warm_up(client, await self._dataset.requests(client, 1), 1)
        finally:
            await client.close()

    async def probe(self, rate: float) -> Probe:
        """One rate."""
        given = self._given
        self._num_probes += 1
        count = max(given["min_prompts"], math.ceil(rate * given["probe_s"]))
        client = LoadClient(with_salt(self._target, given))
        client.model = self.model
        try:
            requests = await self._dataset.requests(client, count, draw=self._num_probes)
            arrivals = self._dataset.arrivals(count, rate)
            last_s = float(arrivals[-1])
            load = await run_load(
                client.send, requests, arrivals, deadline_s=last_s + given["drain_s"]
            )
        finally:
            await client.close()
        broken = judge(
            load,
            self._objectives,
            warmup_s=given["warmup_share"] * last_s,
            max_failed_share=given["max_failed_share"],
        )
        logger.info("%.4g requests/s: %s", rate, "; ".join(broken) or "passed")
        return Probe(request_rate=rate, broken=broken, figures=self._figures(load))

    def _figures(self, load: LoadResult) -> dict[str, Any]:
        statistics = {one.statistic for one in self._objectives} - {"mean", "median"}
        wanted = sorted({*PERCENTILES, *(float(name[1:]) for name in statistics)})
        figures = load_figures(load.records, load.duration_s, percentiles=wanted)
        return {**figures, "num_not_sent": load.num_not_sent, "client": client_figures(load)}


def _result(
    given: Mapping[str, Any],
    model: str,
    dataset: Dataset,
    objectives: Sequence[Objective],
    found: Capacity,
) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jaxserve_version": __version__,
        "backend": given["backend"],
        "model": model,
        "slo": {one.name: one.limit_ms for one in objectives},
        "request_rate": found.request_rate,
        "failed_rate": found.failed_rate,
        "ended_by": found.ended_by,
        "probe_s": given["probe_s"],
        **dataset.describe(),
        "probes": [
            {
                "request_rate": one.request_rate,
                "passed": one.passed,
                "broken": list(one.broken),
                **one.figures,
            }
            for one in found.probes
        ],
    }
