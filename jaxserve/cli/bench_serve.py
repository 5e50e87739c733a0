"""`jaxserve bench serve`: puts a running server under load and measures what its clients see.

Called by `bench.py`. Invariant: nothing is measured on a server that does not answer a request before the
load, and a request that failed counts as that and nowhere else.
"""

import asyncio
import datetime
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from jaxserve import __version__
from jaxserve.cli.arguments import UsageError
from jaxserve.cli.bench_result import check_output, rounded, write_file, write_result
from jaxserve.cli.command_line import read_command_line
from jaxserve.cli.flag_types import define_auto_integer, define_float, define_integer
from jaxserve.cli.flags import configure_logging, define_general
from jaxserve.cli.load_flags import (
    Dataset,
    define_dataset,
    define_target,
    read_target,
    require,
    with_salt,
)
from jaxserve.cli.output_files import check_writable
from jaxserve.cli.stop_signals import StopSignals
from jaxserve.server.load.client import LoadClient, ServerError, Target
from jaxserve.server.load.figures import GOODPUT_LATENCIES, PERCENTILES, load_figures
from jaxserve.server.load.records import LoadRequest, RequestRecord
from jaxserve.server.load.run_load import LoadResult, run_load

USAGE = """\
usage: jaxserve bench serve [--base_url=http://127.0.0.1:8000] [flags]

Sends --num_prompts requests to a running server at --request_rate and prints one JSON object, with the
names and definitions of `vllm bench serve`: request_throughput, output_throughput,
total_token_throughput (a second), max_output_tokens_per_s, max_concurrent_requests, and mean_, median_,
std_ and percentiles of ttft_ms (to the first part of an output), tpot_ms (a request's mean time of an
output token after the first), itl_ms (between parts, all outputs together) and e2el_ms (to the end).
--goodput=ttft:500,tpot:50 adds request_goodput, the requests a second that kept these limits, and
goodput_share. Requests without an answer are counted under failures, by kind. A client that could not
keep up would be seen in client.p99_lateness_ms. Any OpenAI-compatible server will do.
exit code: 0 measured, 1 measured but some requests failed, 2 could not be measured, 130 or 143 stopped
by SIGINT or SIGTERM
"""
_DEFAULT_NUM_PROMPTS = 100  # of drawn datasets
_LATE_MS = 100.0
logger = logging.getLogger("jaxserve.cli")


def serve_flags() -> flags.FlagValues:
    """The flags of `bench serve`."""
    values = flags.FlagValues()
    group = {"flag_values": values, "module_name": "measurement"}
    define_auto_integer(
        "num_prompts", "Requests to send; auto = each line of the file once, else 100.", **group
    )
    define_float(
        "request_rate", math.inf, "Requests a second on average; inf = all at once.", **group
    )
    define_auto_integer(
        "max_concurrency",
        "Most requests under way at once; auto = no limit. Waiting for a place is no part of a latency.",
        **group,
    )
    define_integer(
        "num_warmups", 1, "Requests before the load that do not count.", lower_bound=1, **group
    )
    flags.DEFINE_list(
        "goodput", [], "Limits in milliseconds, as ttft:500,tpot:50,e2el:10000.", **group
    )
    flags.DEFINE_list(
        "percentiles", [f"{p:g}" for p in PERCENTILES], "Of each latency, in [0, 100].", **group
    )
    flags.DEFINE_string("output", None, "Write the JSON object to this file as well.", **group)
    flags.DEFINE_string(
        "records", None, "Write each request's times and tokens, JSON lines.", **group
    )
    define_target(values)
    define_dataset(values)
    define_general(values)
    return values


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0; 1 where requests failed.

    Raises:
        JaxserveError: it could not be measured.
    """
    given = read_command_line(argv, serve_flags(), USAGE)
    if given is None:
        return 0
    target = read_target(given)
    _check(given)
    dataset = Dataset(given)
    check_output(given["output"])
    if given["records"]:
        check_writable("records", given["records"])
    configure_logging(given["verbosity"])
    with StopSignals("before the load was over: there is no result") as stop:
        model, load = asyncio.run(_measure(given, target, dataset))
        stop.defer()
        result = _result(given, model, dataset, load)
        if given["records"]:
            write_file(given["records"], b"".join(_lines(load.records)))
        write_result(result, given["output"])
    return 1 if result["failed"] else 0


def _check(given: dict[str, Any]) -> None:
    require(given["request_rate"] > 0, given, "request_rate", "above 0")
    for name in ("num_prompts", "max_concurrency"):
        require(given[name] is None or given[name] >= 1, given, name, "at least 1, or auto")
    _goodput(given)
    _percentiles(given)


def _goodput(given: Mapping[str, Any]) -> dict[str, float]:
    """Limit in milliseconds by latency."""
    limits = {}
    for text in given["goodput"]:
        name, _, limit = text.strip().partition(":")
        if name not in GOODPUT_LATENCIES or not _is_above_zero(limit):
            raise UsageError(
                f"--goodput={text}: must be {', '.join(GOODPUT_LATENCIES)} with milliseconds above 0, "
                "as in ttft:500,tpot:50"
            )
        limits[name] = float(limit)
    return limits


def _is_above_zero(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _percentiles(given: Mapping[str, Any]) -> list[float]:
    try:
        values = [float(text) for text in given["percentiles"]]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 100 for value in values):
        text = ",".join(given["percentiles"])
        raise UsageError(f"--percentiles={text}: must be numbers in [0, 100] with commas between")
    return values


async def _measure(
    given: Mapping[str, Any], target: Target, dataset: Dataset
) -> tuple[str, LoadResult]:
    """(the model's name, what was measured)."""
    warm, client = (
        LoadClient(with_salt(target, dict(given))),
        LoadClient(with_salt(target, dict(given))),
    )
    try:
        client.model = warm.model = await client.find_model()
        num = given["num_prompts"]
        if num is None and dataset.num_lines is None:
            num = _DEFAULT_NUM_PROMPTS
        requests = await dataset.requests(client, num)
        await warm_up(warm, requests, given["num_warmups"])
        arrivals = dataset.arrivals(len(requests), given["request_rate"])
        load = await run_load(
            client.send,
            requests,
            arrivals,
            max_concurrency=given["max_concurrency"],
            on_done=_progress(len(requests)),
        )
        return client.model, load
    finally:
        await client.close()
        await warm.close()


async def warm_up(client: LoadClient, requests: Sequence[LoadRequest], count: int) -> None:
    """Sends the first requests, all at once.

    Raises:
        ServerError: one has no answer: there is nothing to measure.
    """
    records = [RequestRecord(index=i) for i in range(count)]
    await asyncio.gather(
        *(client.send(requests[i % len(requests)], record) for i, record in enumerate(records))
    )
    for record in records:
        if not record.is_good:
            raise ServerError(
                f"a request before the load had no answer: {record.failure}: {record.detail}"
            )


def _progress(count: int) -> Callable[[RequestRecord], None]:
    """Says on stderr at every tenth how many requests are done."""
    num_done, num_failed = 0, 0

    def note(record: RequestRecord) -> None:
        nonlocal num_done, num_failed
        num_done += 1
        num_failed += not record.is_good
        if num_done * 10 // count > (num_done - 1) * 10 // count:
            failed = f", {num_failed} of them failed" if num_failed else ""
            logger.info("%d of %d requests are done%s", num_done, count, failed)

    return note


def _result(
    given: Mapping[str, Any], model: str, dataset: Dataset, load: LoadResult
) -> dict[str, Any]:
    rate = given["request_rate"]
    figures = load_figures(
        load.records,
        load.duration_s,
        percentiles=_percentiles(given),
        goodput_ms=_goodput(given),
    )
    client = client_figures(load)
    if client["p99_lateness_ms"] > _LATE_MS:
        logger.warning(
            "the client could not keep up: it sent requests %.0f ms late (p99)",
            client["p99_lateness_ms"],
        )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jaxserve_version": __version__,
        "backend": given["backend"],
        "model": model,
        "num_prompts": len(load.records),
        "request_rate": rate if math.isfinite(rate) else "inf",
        "max_concurrency": given["max_concurrency"],
        **dataset.describe(),
        **figures,
        "goodput_limits_ms": _goodput(given) or None,
        "client": client,
    }


def client_figures(load: LoadResult) -> dict[str, Any]:
    """Whether it was the client that was measured."""
    counted = [one for one in load.records if one.is_good]
    return {
        "cpu_share": load.cpu_s / load.duration_s,
        "p99_lateness_ms": 1e3 * float(np.percentile(load.lateness_s, 99)),
        "token_counts": "usage" if all(one.has_usage for one in counted) else "chunks",
    }


def _lines(records: Sequence[RequestRecord]) -> list[bytes]:
    return [json.dumps(rounded(vars(one))).encode() + b"\n" for one in records]
