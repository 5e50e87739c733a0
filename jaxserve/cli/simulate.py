"""`jaxserve simulate`: replays a trace through the real scheduler, on the clock of a roofline.

Run by `cli/main.py`, which turns the errors into one line and exit code 2. Nothing here imports jax:
there is no device. The work is done in `plan/simulate`.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any

from absl import flags

from jaxserve.cli.command_line import read_command_line
from jaxserve.cli.flag_types import FloatParser
from jaxserve.cli.flags import configure_logging, define_general, define_integer
from jaxserve.cli.model_shapes import MODEL_HELP, find_model
from jaxserve.cli.standard_streams import write_stdout
from jaxserve.config import (
    ADMISSION,
    EVICTION,
    PREEMPTION_MODES,
    SCHEDULING,
    CacheConfig,
    SchedulerConfig,
)
from jaxserve.plan.chips import CHIPS, chip_spec
from jaxserve.plan.simulate import (
    ALLOCATORS,
    ARRIVALS,
    SimulationConfig,
    simulate,
)
from jaxserve.plan.traces import TRACE_FORMATS, read_trace

USAGE = """\
usage: jaxserve simulate --trace=FILE --format=mooncake|azure --model=NAME|DIR --chip=NAME [flags]

Replays a trace of requests through the real scheduler, page pool and radix tree. A roofline of the chip
takes the place of the device: a step takes as long as the slower of its arithmetic and its memory
traffic at peak speed, and 1 ms. So seconds are lower bounds, and the ratio of two runs is what counts.
Prints a table, or one JSON object with --json: block_hit_rate (trace blocks found in the tree at
admission / all), token_hit_rate, kv_utilisation (tokens held / slots of owned pages, weighted by time),
output_tokens_per_s, ttft_s, itl_s and e2el_s (p50, p95, p99, max), num_preemptions, num_steps and more.
exit code: 0 simulated, 2 could not be simulated, 130 interrupted
"""

_TRACE_GROUP, _MACHINE_GROUP = "trace", "machine"
_STEP_GROUP, _PAGES_GROUP = "scheduling", "pages"
_SCHEDULER_FIELDS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling",
    "admission",
    "max_num_partial_prefills",
    "long_prefill_token_threshold",
    "target_itl_s",
    "preemption_mode",
)
_GENERAL_FLAGS = ("help", "helpfull", "flagfile", "verbosity", "json")
# What tells one arm from another, shown above its figures.
_ARM = (
    "model",
    "chip",
    "num_chips",
    "arrivals",
    "scheduling",
    "admission",
    "chunked_prefill",
    "allocator",
    "enable_prefix_caching",
    "preemption_mode",
)
# A server's limits, not those of the engine's defaults, which are for a small machine.
_MAX_NUM_SEQS, _MAX_NUM_BATCHED_TOKENS = 256, 2048
logger = logging.getLogger("jaxserve.cli")


class NumPagesParser(flags.ArgumentParser):
    """An integer, "unlimited", or "auto" for None."""

    syntactic_help = 'an integer, "unlimited" or "auto"'

    def parse(self, argument: str | int | None) -> int | str | None:
        if argument in (None, "", "auto"):
            return None
        if argument == "unlimited":
            return "unlimited"
        try:
            return int(argument)
        except ValueError:
            raise ValueError(f"must be {self.syntactic_help}") from None

    def flag_type(self) -> str:
        return "int, unlimited or auto"


def simulate_flags() -> flags.FlagValues:
    """The flags of the command."""
    values = flags.FlagValues()
    _define_trace(values)
    _define_machine(values)
    _define_step(values)
    _define_pages(values)
    define_general(values)
    return values


def _define_trace(values: flags.FlagValues) -> None:
    group = {"flag_values": values, "module_name": _TRACE_GROUP}
    flags.DEFINE_string("trace", None, "The trace file.", **group)
    flags.DEFINE_enum("format", None, list(TRACE_FORMATS), "How it is written.", **group)
    define_integer(
        "max_requests",
        None,
        "Read only so many requests; unset = all.",
        lower_bound=1,
        upper_bound=2**31 - 1,
        **group,
    )
    flags.DEFINE_enum(
        "arrivals",
        "timed",
        ARRIVALS,
        "timed: requests arrive when the trace says. sequential: each when the one before is done, "
        "prompts alone are cached: the published way of counting block hits.",
        **group,
    )
    _define_float("rate_scale", 1.0, "Requests arrive so many times faster.", **group)
    flags.DEFINE_boolean("json", False, "Print one JSON object, not a table.", **group)


def _define_machine(values: flags.FlagValues) -> None:
    group = {"flag_values": values, "module_name": _MACHINE_GROUP}
    flags.DEFINE_string(
        "model",
        None,
        MODEL_HELP,
        **group,
    )
    flags.DEFINE_enum("chip", None, list(CHIPS), "Whose roofline.", **group)
    define_integer("num_chips", 1, "Chips that share every layer by heads.", **group)


def _define_step(values: flags.FlagValues) -> None:
    default = SchedulerConfig()
    group = {"flag_values": values, "module_name": _STEP_GROUP}
    flags.DEFINE_enum("scheduling", default.scheduling, SCHEDULING, "When requests join.", **group)
    flags.DEFINE_enum(
        "admission",
        default.admission,
        ADMISSION,
        "Which of them first. (Traces name no priorities: priority is fcfs here.)",
        **group,
    )
    flags.DEFINE_boolean(
        "chunked_prefill", True, "Compute prompts in chunks; off: whole, in one step.", **group
    )
    define_integer("max_num_seqs", _MAX_NUM_SEQS, "Most sequences in one step.", **group)
    define_integer(
        "max_num_batched_tokens",
        _MAX_NUM_BATCHED_TOKENS,
        "Token budget of one step, decode tokens and prefill chunks together.",
        **group,
    )
    define_integer(
        "max_model_len", None, "Most tokens of a request; unset = the trace's longest.", **group
    )
    define_integer(
        "max_num_partial_prefills",
        default.max_num_partial_prefills,
        "Most prompts in the middle of their chunks at once; unset = 2, and max_num_seqs with "
        "--admission=short_first.",
        **group,
    )
    define_integer(
        "long_prefill_token_threshold",
        default.long_prefill_token_threshold,
        "Most tokens of a chunk of a prompt longer than a step while others wait; unset = three "
        "quarters of the budget.",
        **group,
    )
    _define_float(
        "target_itl_s",
        default.target_itl_s,
        "Shrink chunks so that a step takes no longer while others decode; unset = no target.",
        **group,
    )
    flags.DEFINE_enum(
        "preemption_mode",
        default.preemption_mode,
        PREEMPTION_MODES,
        "Compute again, move to host RAM and back (--host_kv_gib), or what costs less.",
        **group,
    )


def _define_pages(values: flags.FlagValues) -> None:
    default = CacheConfig()
    group = {"flag_values": values, "module_name": _PAGES_GROUP}
    flags.DEFINE(
        NumPagesParser(),
        "num_pages",
        None,
        "Pages in the pool, the null page included; unlimited = nothing is ever evicted; auto = what "
        "the weights leave of the chips' memory.",
        **group,
    )
    define_integer("page_size", 16, "Tokens a page.", **group)
    _define_float(
        "memory_utilization",
        default.memory_utilization,
        "Share of the chips' memory for weights and pages.",
        **group,
    )
    flags.DEFINE_enum(
        "allocator",
        "paged",
        ALLOCATORS,
        "paged, or what it replaced: each request reserves one run of max_model_len slots, or of the "
        "power of two above its prompt and output.",
        **group,
    )
    flags.DEFINE_boolean(
        "enable_prefix_caching",
        None,
        "Keep computed pages for prompts that begin alike; unset = on where pages are paged.",
        **group,
    )
    flags.DEFINE_enum(
        "eviction", default.eviction, EVICTION, "Which cached pages go first.", **group
    )
    _define_float(
        "host_kv_gib", default.host_kv_gib, "Host RAM to swap preempted pages to, GiB.", **group
    )


def _define_float(name: str, default: float | None, text: str, **group: Any) -> None:
    flags.DEFINE(FloatParser(), name, default, text, serializer=flags.ArgumentSerializer(), **group)


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: the arguments behind `simulate`.

    Returns:
        0.

    Raises:
        UsageError: a flag is missing or at fault.
        ConfigError: a value outside its range, or a trace that does not fit the machine.
        TraceError: the trace cannot be read.
    """
    given = read_command_line(
        argv, simulate_flags(), USAGE, needed=("trace", "format", "model", "chip")
    )
    if given is None:
        return 0
    configure_logging(given["verbosity"])
    config = simulation_config(given)
    trace = read_trace(given["trace"], given["format"], max_requests=given["max_requests"])
    logger.info(
        "%s: %d requests, %d prompt and %d output tokens, the longest %d",
        trace.name,
        len(trace.requests),
        trace.num_prompt_tokens,
        trace.num_output_tokens,
        trace.longest,
    )
    result = simulate(config, trace)
    settings = {key: value for key, value in given.items() if key not in _GENERAL_FLAGS}
    record = {**result.to_json(), "settings": settings}
    text = json.dumps(record, indent=2, allow_nan=False) if given["json"] else table(record)
    write_stdout(text + "\n")
    return 0


def simulation_config(given: dict[str, Any]) -> SimulationConfig:
    """The flags as a config.

    Raises:
        UsageError: no such model.
        ConfigError: a value outside its range.
    """
    unlimited = given["num_pages"] == "unlimited"
    caching = given["enable_prefix_caching"]
    return SimulationConfig(
        model=find_model(given["model"]),
        chip=chip_spec(given["chip"]),
        num_chips=given["num_chips"],
        scheduler=SchedulerConfig(**{name: given[name] for name in _SCHEDULER_FIELDS}),
        cache=CacheConfig(
            page_size=given["page_size"],
            num_pages=None if unlimited else given["num_pages"],
            memory_utilization=given["memory_utilization"],
            enable_prefix_caching=given["allocator"] == "paged" if caching is None else caching,
            eviction=given["eviction"],
            host_kv_gib=given["host_kv_gib"],
        ),
        unlimited_pages=unlimited,
        max_model_len=given["max_model_len"],
        allocator=given["allocator"],
        chunked_prefill=given["chunked_prefill"],
        arrivals=given["arrivals"],
        rate_scale=given["rate_scale"],
    )


def table(record: dict[str, Any]) -> str:
    """The result for people: the arm, then a line per figure, times in seconds."""
    settings = record["settings"]
    arm = [name for name in _ARM if settings[name] is not None]
    lines = [f"{name:<24}{settings[name]}" for name in arm]
    for name, value in record.items():
        if name != "settings":
            lines.append(f"{name:<24}{_shown(name, value)}")
    return "\n".join(lines)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key} {number:.4g}" for key, number in value.items())
    if value is None:
        return "unlimited" if name == "num_pages" else "-"
    if name.endswith(("_rate", "utilisation")):
        return f"{value:.2%}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
