"""The goals and what was measured, as the Markdown table of docs/performance.md.

Used by `scripts/bench_peers --table`. Invariant: a row that no result speaks of says so; nothing is
filled in from elsewhere.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.peers.comparison import ComparisonError

Result = Mapping[str, Any]
NOT_MEASURED = "not measured yet"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A row of the table.

    Args:
        what: is measured.
        against: what it is compared with.
        least, most: the goal, one of them; the median decides.
        find: result -> a spread, as `comparison.spread` makes it; KeyError where it is not there.
    """

    what: str
    against: str
    find: Callable[[Result], Mapping[str, Any]]
    least: float | None = None
    most: float | None = None

    @property
    def text(self) -> str:
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"

    def is_reached(self, median: float) -> bool:
        """Whether a median meets the goal."""
        if self.least is not None:
            return median >= self.least
        assert self.most is not None
        return median <= self.most


def _speed(workload: str, peer: str, mode: str) -> Callable[[Result], Mapping[str, Any]]:
    return lambda result: result["workloads"][workload]["against"][peer][mode]["speed"]


def _inverse(find: Callable[[Result], Mapping[str, Any]]) -> Callable[[Result], Mapping[str, Any]]:
    def found(result: Result) -> Mapping[str, Any]:
        one = find(result)
        return {"median": 1 / one["median"], "min": 1 / one["max"], "max": 1 / one["min"]}

    return found


def _startup_ratio(result: Result) -> Mapping[str, Any]:
    ours, theirs = (result["startup"][name]["later_s"] for name in ("jaxserve", "vllm"))
    return {
        "median": ours["median"] / theirs["median"],
        "min": ours["min"] / theirs["max"],
        "max": ours["max"] / theirs["min"],
    }


GOALS = (
    Goal(what="w1, output tokens/s", against="vLLM", least=1.1, find=_speed("w1", "vllm", "on")),
    Goal(
        what="w1, output tokens/s",
        against="transformers, static batch",
        least=3,
        find=_speed("w1", "transformers", "off"),
    ),
    Goal(
        what="w1, output tokens/s",
        against="llama.cpp",
        least=3,
        find=_speed("w1", "llama_cpp", "off"),
    ),
    Goal(
        what="w3, wall time, prefix cache on",
        against="vLLM, prefix cache on",
        most=0.9,
        find=_inverse(_speed("w3", "vllm", "on")),
    ),
    Goal(
        what="w3, wall time without / with prefix cache",
        against="itself",
        least=3,
        find=lambda result: result["workloads"]["w3"]["cache"]["jaxserve"],
    ),
    Goal(what="w2, tokens/s", against="vLLM", least=1.5, find=_speed("w2", "vllm", "on")),
    Goal(
        what="w2, tokens/s",
        against="transformers",
        least=1.5,
        find=_speed("w2", "transformers", "off"),
    ),
    Goal(
        what="w2, tokens/s",
        against="the memory roofline, float32",
        least=0.8,
        find=lambda result: result["roofline"]["reached"],
    ),
    Goal(what="w2, tokens/s", against="llama.cpp", least=1, find=_speed("w2", "llama_cpp", "off")),
    Goal(
        what="start-up to first token, s, second start",
        against="-",
        most=5,
        find=lambda result: result["startup"]["jaxserve"]["later_s"],
    ),
    Goal(
        what="start-up to first token, second start",
        against="vLLM, second start",
        most=0.1,
        find=_startup_ratio,
    ),
)


def read_result(path: Path) -> Result:
    """A result that `bench_peers --output` wrote.

    Raises:
        ComparisonError: the file holds none.
    """
    try:
        result = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ComparisonError(f"{path} is no result of bench_peers: {error}") from None
    if not isinstance(result, dict) or not {"date", "machine", "num_repetitions"} <= result.keys():
        raise ComparisonError(f"{path} is no result of bench_peers")
    return result


def goals_table(results: Sequence[Result]) -> str:
    """The goals with what was measured of them.

    Args:
        results: of `bench_peers`; the last one that speaks of a goal counts.
    """
    lines = [
        "| what | against | goal | measured (least to most) | reached | date | machine |",
        "|---|---|---|---|---|---|---|",
    ]
    for goal in GOALS:
        cells = [NOT_MEASURED, "", "", ""]
        for result in results:
            try:
                found = goal.find(result)
            except KeyError:
                continue
            text = f"{found['median']:.3g} ({found['min']:.3g} to {found['max']:.3g})"
            reached = "yes" if goal.is_reached(found["median"]) else "no"
            cells = [text, reached, result["date"], result["machine"]["text"]]
        lines.append(f"| {' | '.join([goal.what, goal.against, goal.text, *cells])} |")
    return "\n".join(lines) + "\n"


def figures_table(results: Sequence[Result]) -> str:
    """What each engine did with each workload, medians with least and most, and whose ids are equal."""
    lines = [
        "| workload | engine | prefix cache | output tokens/s | wall, s | first token, s | ids as ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for workload, found in result.get("workloads", {}).items():
            for engine, by_mode in found["engines"].items():
                for mode, figures in by_mode.items():
                    equal = found["against"].get(engine, {}).get(mode)
                    cells = [
                        workload,
                        engine,
                        mode,
                        *(
                            _cell(figures.get(name))
                            for name in ("output_tokens_per_s", "wall_s", "ttft_s")
                        ),
                        "-"
                        if equal is None
                        else f"{equal['num_equal_requests']} of {found['num_requests']}",
                    ]
                    lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "-"
    return f"{figures['median']:.3g} ({figures['min']:.3g} to {figures['max']:.3g})"
