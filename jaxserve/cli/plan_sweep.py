"""`jaxserve plan --sweep`: how latency grows with the load, from the simulator on a trace.

Called by `plan.py`. The trace is replayed at several rates on the planned chips and pages; each rate is a
point of the curves. Invariant: the pages, the limits of a step and the roofline are those of the plan.
"""

import csv
import logging
import math
from pathlib import Path
from typing import Any

from absl import flags

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.flag_types import define_integer
from jaxserve.cli.output_files import check_writable
from jaxserve.config import CacheConfig
from jaxserve.plan.planner import Plan
from jaxserve.plan.simulate import SimulationConfig, SimulationResult, simulate
from jaxserve.plan.traces import TRACE_FORMATS, read_trace

_GROUP = "throughput-latency curves"
_CHART_COLUMNS, _CHART_ROWS = 56, 12
POINT_FIELDS = (
    "rate_scale",
    "requests_per_s",
    "output_tokens_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "itl_p50_s",
    "itl_p99_s",
    "e2el_p50_s",
    "e2el_p99_s",
    "num_preemptions",
    "token_hit_rate",
)
logger = logging.getLogger("jaxserve.cli")


class RatesParser(flags.ArgumentParser):
    """Numbers above 0 with commas between them."""

    syntactic_help = "numbers above 0 with commas between them"

    def parse(self, argument: str | list[float]) -> list[float]:
        if isinstance(argument, list):
            return argument
        try:
            rates = [float(part) for part in argument.split(",")]
        except ValueError:
            rates = []
        if not rates or not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"must be {self.syntactic_help}")
        return sorted(set(rates))

    def flag_type(self) -> str:
        return "numbers"


def define_sweep(values: flags.FlagValues) -> None:
    """--sweep, --format, --max_requests, --rate_scales, --sweep_csv."""
    group: dict[str, Any] = {"flag_values": values, "module_name": _GROUP}
    flags.DEFINE_string(
        "sweep",
        None,
        "Replay this trace at several rates on the planned chips, and draw latency over throughput.",
        **group,
    )
    flags.DEFINE_enum("format", None, list(TRACE_FORMATS), "How the trace is written.", **group)
    define_integer(
        "max_requests",
        500,
        "Read only so many requests of the trace.",
        lower_bound=1,
        upper_bound=2**31 - 1,
        **group,
    )
    flags.DEFINE(
        RatesParser(),
        "rate_scales",
        [0.25, 0.5, 1.0, 2.0, 4.0, 8.0],
        "How many times faster than in the trace requests arrive: a point of the curves each.",
        serializer=flags.ListSerializer(","),
        **group,
    )
    flags.DEFINE_string("sweep_csv", None, "Write the points to this file too.", **group)


def check_sweep(given: dict[str, Any]) -> None:
    """Refuses what cannot be swept, before anything is computed.

    Raises:
        UsageError: --sweep without --format, a flag of it without --sweep, a file that cannot be written.
    """
    if given["sweep"] and not given["format"]:
        raise UsageError("--sweep needs --format: mooncake or azure")
    for name in ("format", "sweep_csv"):
        if given[name] and not given["sweep"]:
            raise UsageError(f"--{name} belongs to --sweep, which was not given")
    if given["sweep_csv"]:
        check_writable("sweep_csv", given["sweep_csv"])


def sweep(given: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The points, and a chart of them.

    Args:
        given: the flags by name.
        plan: of `make_plan`, one that fits.

    Returns:
        JSON values: trace, num_requests, points (an object of `POINT_FIELDS` each), chart (text).

    Raises:
        TraceError: the trace cannot be read.
        ConfigError: a request of it does not fit.
    """
    trace = read_trace(given["sweep"], given["format"], max_requests=given["max_requests"])
    points = []
    for rate in given["rate_scales"]:
        result = simulate(_simulation(plan, rate), trace)
        points.append(_point(rate, result))
        logger.info(
            "%s at %g times its rate: %.0f output tokens/s, TTFT p50 %.3g s",
            trace.name,
            rate,
            points[-1]["output_tokens_per_s"],
            points[-1]["ttft_p50_s"],
        )
    if given["sweep_csv"]:
        _write_csv(Path(given["sweep_csv"]), points)
    return {
        "trace": trace.name,
        "num_requests": len(trace.requests),
        "points": points,
        "chart": curves(points),
    }


def _simulation(plan: Plan, rate: float) -> SimulationConfig:
    config = plan.config
    return SimulationConfig(
        model=config.model,
        chip=config.chip,
        num_chips=config.num_chips,
        dtype=config.dtype,
        scheduler=config.scheduler,
        cache=CacheConfig(
            page_size=plan.page_size,
            num_pages=plan.memory.num_pages,
            kv_cache_dtype=config.cache.kv_cache_dtype,
        ),
        rate_scale=rate,
    )


def _point(rate: float, result: SimulationResult) -> dict[str, Any]:
    found = result.to_json()
    seconds = {
        f"{name}_{percentile}_s": (found[f"{name}_s"] or {}).get(percentile)
        for name in ("ttft", "itl", "e2el")
        for percentile in ("p50", "p99")
    }
    values = {
        "rate_scale": rate,
        "requests_per_s": found["num_requests"] / found["simulated_s"],
        "output_tokens_per_s": found["output_tokens_per_s"],
        "num_preemptions": found["num_preemptions"],
        "token_hit_rate": found["token_hit_rate"],
        **seconds,
    }
    return {name: values[name] for name in POINT_FIELDS}


def _write_csv(path: Path, points: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, POINT_FIELDS)
        writer.writeheader()
        writer.writerows([{name: one[name] for name in POINT_FIELDS} for one in points])


def curves(points: list[dict[str, Any]]) -> str:
    """A table of the points, and p50 and p99 of the time to the first token and of the gaps between tokens
    over throughput, as text.

    Args:
        points: by ascending rate.
    """
    lines = [
        "from the simulator (a step at the peak of the chip, and 1 ms; latencies in seconds)",
        f"  {'rate':>7}{'requests/s':>12}{'tokens/s':>11}{'TTFT p50':>11}{'p99':>9}{'ITL p50':>11}{'p99':>9}",
    ]
    for one in points:
        lines.append(
            f"  {one['rate_scale']:>6g}x{one['requests_per_s']:>12,.2f}{one['output_tokens_per_s']:>11,.0f}"
            + "".join(
                f"{'-' if one[name] is None else format(one[name], '.3g'):>{width}}"
                for name, width in (
                    ("ttft_p50_s", 11),
                    ("ttft_p99_s", 9),
                    ("itl_p50_s", 11),
                    ("itl_p99_s", 9),
                )
            )
        )
    for name, title in (("ttft", "time to the first token"), ("itl", "gap between tokens")):
        lines += ["", *_chart(f"{title}, s (o p50, + p99), over output tokens/s", points, name)]
    return "\n".join(lines)


def _chart(title: str, points: list[dict[str, Any]], name: str) -> list[str]:
    """A scatter of both percentiles, the latency on a logarithmic axis."""
    marks = [
        (one["output_tokens_per_s"], one[f"{name}_{percentile}_s"], mark)
        for percentile, mark in (("p99", "+"), ("p50", "o"))
        for one in points
        if one[f"{name}_{percentile}_s"]
    ]
    if not marks:
        return [f"{title}: nothing to draw"]
    most = max(x for x, _, _ in marks)
    low, high = (math.log10(edge(y for _, y, _ in marks)) for edge in (min, max))
    span = max(high - low, 1e-9)
    grid = [[" "] * _CHART_COLUMNS for _ in range(_CHART_ROWS)]
    for x, y, mark in marks:
        column = round(x / most * (_CHART_COLUMNS - 1))
        row = round((high - math.log10(y)) / span * (_CHART_ROWS - 1))
        grid[row][column] = mark
    lines = [title]
    for index, cells in enumerate(grid):
        label = 10 ** (high - span * index / (_CHART_ROWS - 1))
        shown = f"{label:.3g}" if index % 3 == 0 or index == _CHART_ROWS - 1 else ""
        lines.append(f"  {shown:>9} |{''.join(cells)}")
    lines.append(f"  {'':>9} +{'-' * _CHART_COLUMNS}")
    lines.append(f"  {'':>9}  0{f'{most:,.0f}':>{_CHART_COLUMNS - 1}}")
    return lines
