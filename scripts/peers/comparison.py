"""What the runs of several engines say about each other: medians with spread, ratios, equal ids. Pure.

Used by `scripts/bench_peers`. Runs are kept as runs[engine][mode] -> replies, one a repetition; a mode is
"on" or "off", with or without a prefix cache. Invariant: a ratio is made of runs that followed each other
in one repetition, so that a machine that slows down between repetitions changes no ratio.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Replies = list[dict[str, Any]]
Runs = Mapping[str, Mapping[str, Replies]]
OWN = "jaxserve"


class ComparisonError(Exception):
    """A workload, or what an engine made of it, that allows no comparison."""


def read_requests(workload: Path) -> list[dict[str, Any]]:
    """The workload's lines; they must leave nothing to any engine's choice.

    Raises:
        ComparisonError: a line at fault.
    """
    try:
        requests = [json.loads(line) for line in workload.read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ComparisonError(f"{workload} is no workload: {error}") from None
    for number, one in enumerate(requests, 1):
        wanted = {"ignore_eos": True, "temperature": 0}
        fixed = all(one.get(name) == value for name, value in wanted.items())
        if not fixed or not one.get("prompt_token_ids") or not one.get("max_tokens"):
            raise ComparisonError(
                f"{workload}, line {number}: prompt_token_ids, max_tokens, ignore_eos true and "
                "temperature 0 are needed"
            )
    if not requests:
        raise ComparisonError(f"{workload} holds no requests")
    return requests


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and most, and the values themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "each": list(values),
    }


def modes(has_shared_prefix: bool, shares_prefixes: bool) -> list[str]:
    """How an engine runs a workload: where prompts have a prefix in common, both with and without a
    prefix cache if it has one; else once.
    """
    if not shares_prefixes:
        return ["off"]
    return ["on", "off"] if has_shared_prefix else ["on"]


def first_differences(requests: Sequence[dict], ours: Replies, theirs: Replies) -> list[dict]:
    """Where ids differ in any repetition: the request and its first different output token.

    Raises:
        ComparisonError: a request did not get the number of tokens that it asks for.
    """
    found = []
    for index, one in enumerate(requests):
        outputs = [reply["token_ids"][index] for reply in (*ours, *theirs)]
        counts = sorted({len(ids) for ids in outputs})
        if counts != [one["max_tokens"]]:
            raise ComparisonError(
                f"line {index + 1} asks for {one['max_tokens']} tokens, got {counts}"
            )
        firsts = [at for at, ids in enumerate(zip(*outputs, strict=True)) if len(set(ids)) > 1]
        if firsts:
            found.append({"line": index + 1, "id": one.get("id"), "first_difference": firsts[0]})
    return found


def describe(requests: Sequence[dict], replies: Replies) -> dict[str, Any]:
    """The figures of one engine in one mode."""
    num_tokens = sum(one["max_tokens"] for one in requests)
    walls = [reply["wall_s"] for reply in replies]
    firsts = [reply["first_token_s"] for reply in replies]
    described: dict[str, Any] = {
        "wall_s": spread(walls),
        "output_tokens_per_s": spread([num_tokens / wall for wall in walls]),
    }
    if all(firsts):
        described["ttft_s"] = spread([statistics.fmean(one) for one in firsts])
    return {
        **described,
        "cpu_s": [reply.get("cpu_s") for reply in replies],
        "others_cpu_s": [reply.get("others_cpu_s") for reply in replies],
        "notes": [reply["notes"] for reply in replies],
    }


def ratio_of_walls(numerator: Replies, denominator: Replies) -> dict[str, Any]:
    """Wall time of one engine over that of another, repetition by repetition."""
    pairs = zip(numerator, denominator, strict=True)
    return spread([one["wall_s"] / other["wall_s"] for one, other in pairs])


def compare(requests: Sequence[dict], runs: Runs) -> dict[str, Any]:
    """The result of one workload.

    Args:
        requests: its lines.
        runs: OWN's among them.

    Returns:
        "engines": figures by engine and mode; "against": for each peer and mode how many times faster
        jaxserve is ("speed", wall of the peer / own wall) and whose ids are equal; "cache": how many
        times faster each engine is with a prefix cache.

    Raises:
        ComparisonError: some request got too few tokens.
    """
    own = runs[OWN]
    against: dict[str, Any] = {}
    for name, by_mode in runs.items():
        for mode, replies in by_mode.items() if name != OWN else ():
            ours = own.get(mode) or next(iter(own.values()))
            different = first_differences(requests, ours, replies)
            against.setdefault(name, {})[mode] = {
                "speed": ratio_of_walls(replies, ours),
                "num_equal_requests": len(requests) - len(different),
                "different_requests": different,
            }
    return {
        "num_requests": len(requests),
        "num_output_tokens": sum(one["max_tokens"] for one in requests),
        "engines": {
            name: {mode: describe(requests, replies) for mode, replies in by_mode.items()}
            for name, by_mode in runs.items()
        },
        "against": against,
        "cache": {
            name: ratio_of_walls(by_mode["off"], by_mode["on"])
            for name, by_mode in runs.items()
            if {"on", "off"} <= set(by_mode)
        },
    }


def decode_roofline(
    request: Mapping[str, Any], runs: Replies, machine: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """How near a single stream comes to the speed at which its bytes can be read.

    Args:
        request: the only one of the workload.
        runs: of jaxserve.
        machine: a reply to "roofline" for each of them, measured right after it.
    """
    context = len(request["prompt_token_ids"]) + request["max_tokens"] / 2
    limits = [
        one["stream_bytes_per_s"] / (one["weight_bytes"] + context * one["kv_bytes_per_token"])
        for one in machine
    ]
    speeds = [request["max_tokens"] / reply["wall_s"] for reply in runs]
    return {
        "stream_bytes_per_s": spread([one["stream_bytes_per_s"] for one in machine]),
        "gemm_flops_per_s": spread([one["gemm_flops_per_s"] for one in machine]),
        "tokens_per_s": spread(limits),
        "reached": spread([speed / limit for speed, limit in zip(speeds, limits, strict=True)]),
    }
