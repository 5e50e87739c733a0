"""`jaxserve bench latency`: how long one batch of equal requests takes to its first token and between
tokens, and with --profile where the time of a step goes.

Called by `bench.py`. Invariant: prompts differ between requests and nothing is found in the prefix cache;
one replay that does not count comes before the measurement.
"""

import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from absl import flags

from jaxserve import __version__
from jaxserve.cli import text_engine
from jaxserve.cli.arguments import UsageError
from jaxserve.cli.bench_arm import (
    Arm,
    Timeline,
    build_arm,
    distribution,
    make_compile_counter,
    measure_in_turns,
    salted,
)
from jaxserve.cli.bench_result import check_output, peak_rss_bytes, write_result
from jaxserve.cli.command_line import read_command_line
from jaxserve.cli.flag_types import define_integer
from jaxserve.cli.flags import (
    check_engine_options,
    configure_logging,
    define_engine,
    define_general,
    engine_options,
)
from jaxserve.cli.request_line import RequestLine
from jaxserve.cli.stop_signals import StopSignals
from jaxserve.config import SCHEDULING, EngineConfig
from jaxserve.request import SamplingParams

USAGE = """\
usage: jaxserve bench latency --model=DIR|FILE.gguf|NAME [flags]

Runs a batch of --batch_size requests, --input_len prompt tokens and --output_len output tokens each,
--repetitions times, and prints one JSON object: ttft_s, itl_s (between two tokens of a request), tpot_s
(a request's mean of these) and e2el_s as percentiles over all requests of all repetitions, and
output_tokens_per_s. --profile runs it once more, waiting for each program of a step, and adds what each
of them costs: its median time, the bytes that it has to move, its operations, and how near that is to
what the machine can do. Stopped by a signal once a repetition is done, it gives the result of those that
are done, without a profile and with "partial": true.
exit code: 0 measured, 2 could not be measured, 130 or 143 stopped by SIGINT or SIGTERM
"""

_PROMPT_IDS = 64  # prompts are drawn from the first ids: every vocabulary has as many
_MAX_PROFILED_STEPS = 32
_LEAST_PROFILED_LEN = 7  # output tokens beside those of one decode step
logger = logging.getLogger("jaxserve.cli")


def latency_flags() -> flags.FlagValues:
    """The flags of `bench latency`."""
    values = flags.FlagValues()
    group = {"flag_values": values, "module_name": "measurement"}
    define_integer("batch_size", 1, "Requests that run together.", lower_bound=1, **group)
    define_integer("input_len", 64, "Prompt tokens of each.", lower_bound=1, **group)
    define_integer("output_len", 128, "Output tokens of each.", lower_bound=2, **group)
    define_integer("repetitions", 5, "How often to run the batch.", lower_bound=1, **group)
    flags.DEFINE_enum(
        "scheduling",
        EngineConfig().scheduler.scheduling,
        list(SCHEDULING),
        "static is for comparison only.",
        **group,
    )
    flags.DEFINE_boolean("profile", False, "Tell where the time of a decode step goes.", **group)
    flags.DEFINE_string("output", None, "Write the JSON object to this file as well.", **group)
    define_engine(values)
    define_general(values)
    return values


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0; 130 or 143 where a signal left a part of the measurement undone.

    Raises:
        JaxserveError: it could not be measured.
    """
    values = latency_flags()
    given = read_command_line(argv, values, USAGE, needed=("model",))
    if given is None:
        return 0
    if given["batch_size"] > given["max_num_seqs"]:
        raise UsageError(
            f"--batch_size={given['batch_size']}: at most --max_num_seqs={given['max_num_seqs']} "
            "requests run together"
        )
    least = _LEAST_PROFILED_LEN + given["num_decode_steps"]
    if given["profile"] and given["output_len"] < least:
        raise UsageError(
            f"--output_len={given['output_len']}: --profile needs at least {least} to see a decode step"
        )
    check_output(given["output"])
    configure_logging(given["verbosity"])
    options = engine_options(values)
    check_engine_options(options)
    with StopSignals("before a repetition was done: there is no result") as stop:
        result = _measure(given, options, stop)
        write_result(result, given["output"])
    return stop.exit_code if result["partial"] else 0


def _measure(
    given: dict[str, Any], options: dict[str, object], stop: StopSignals
) -> dict[str, Any]:
    arm = build_arm(given["model"], options)
    length = given["input_len"] + given["output_len"]
    limit = arm.llm.engine.stats().max_model_len
    if length > limit:
        raise UsageError(
            f"--input_len={given['input_len']} and --output_len={given['output_len']} make {length} "
            f"tokens, more than max_model_len={limit}"
        )
    lines = make_batch(given["batch_size"], given["input_len"], given["output_len"])
    compiles = make_compile_counter()
    arm.measure(lines, compiles)
    arm.repetitions.clear()
    measure_in_turns([arm], lines, compiles, given["repetitions"], stop)
    num_done = len(arm.repetitions)
    result = {
        "model": given["model"],
        "jaxserve_version": __version__,
        "jax_version": version("jax"),
        "batch_size": given["batch_size"],
        "input_len": given["input_len"],
        "output_len": given["output_len"],
        "num_repetitions": num_done,
        "partial": num_done < given["repetitions"],
        **_figures(arm),
    }
    if given["profile"]:
        found = None
        if not stop.requested:
            found = profile(arm.llm, lines, lambda: stop.requested)
        if found is None:
            logger.warning("stopped by %s: the result has no profile", stop.name)
        result |= {"partial": True} if found is None else {"profile": found}
    return result


def make_batch(batch_size: int, input_len: int, output_len: int) -> list[RequestLine]:
    """Greedy requests of one length, with random prompts that are the same in every run."""
    prompts = np.random.default_rng(0).integers(1, _PROMPT_IDS, (batch_size, input_len)).tolist()
    params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True, seed=0)
    return [
        RequestLine(index=index, prompt=prompt, params=params)
        for index, prompt in enumerate(prompts)
    ]


def time_per_output_token_s(timeline: Timeline) -> float:
    """Mean seconds between a request's tokens, after the first.

    Args:
        timeline: of a request with two tokens or more.
    """
    first, *_, last = timeline.release_s
    return (last - first) / (len(timeline.token_ids) - 1)


def _figures(arm: Arm) -> dict[str, Any]:
    """`Arm.summary`, with the time per output token, and without what says nothing here."""
    summary = arm.summary()
    timelines = [one for repetition in arm.repetitions for one in repetition.timelines]
    several = [one for one in timelines if len(one.release_s) > 1]
    tpot = distribution([time_per_output_token_s(one) for one in several])
    kept = ("output_tokens_per_s", "ttft_s", "itl_s", "e2el_s", "compiles_after_warmup", "startup")
    figures = {name: summary[name] for name in kept}
    return {
        **figures,
        "tpot_s": tpot,
        "peak_rss_bytes": peak_rss_bytes(),
        "engine": summary["engine"],
    }


def profile(
    llm: text_engine.TextEngine,
    lines: Sequence[RequestLine],
    is_stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """What the programs of a decode step cost, measured while the engine runs the batch once more.

    Recording begins when every request has its first token, and ends before one of them ends. None if
    it was stopped meanwhile.
    """
    from jaxserve.device.ceilings import measure_ceilings
    from jaxserve.device.step_profile import record_calls

    logger.info("profile: what the machine can do")
    ceilings = measure_ceilings()
    if is_stopped():
        return None
    logger.info("profile: the batch once more, waiting for each program of a step")
    for line in salted(lines, 0):
        text_engine.add_line(llm, str(line.index), line)
    num_outputs = dict.fromkeys((str(line.index) for line in lines), 0)
    output_len = lines[0].params.max_tokens or 0
    num_prompt_tokens = sum(len(line.prompt or ()) for line in lines)

    def step() -> None:
        for output in llm.step():
            num_outputs[output.request_id] += len(output.outputs[0].token_ids)

    # One may fail without a token.
    while not min(num_outputs.values()) and llm.engine.has_work() and not is_stopped():
        step()
    with record_calls(llm.engine.executor.programs) as calls:  # type: ignore[attr-defined]
        begin = sum(num_outputs.values())
        for _ in range(_MAX_PROFILED_STEPS):
            ends_soon = max(num_outputs.values()) >= output_len - 2
            if ends_soon or not llm.engine.has_work() or is_stopped():
                break
            step()
        end = sum(num_outputs.values())
    while llm.engine.has_work() and not is_stopped():
        step()
    if is_stopped():
        return None
    num_context_tokens = num_prompt_tokens + (begin + end) // 2
    return _profile(list(calls.values()), num_context_tokens, ceilings)


def _profile(calls: Sequence[Any], num_context_tokens: int, ceilings: Any) -> dict[str, Any]:
    """The JSON of a profile.

    Args:
        calls: `ProgramCalls` of whole steps.
        num_context_tokens: over the rows, in the middle of the recording.
        ceilings: `Ceilings` of the machine.
    """
    if not calls:
        raise UsageError(
            "--profile: no step was seen in which all requests decode: give a larger --output_len, or a "
            "batch that fits in the KV pages at once"
        )
    num_steps = min(len(one.seconds) for one in calls)  # a step calls each program once or more
    programs, total_s, total_bytes, total_flops = {}, 0.0, 0.0, 0.0
    for one in calls:
        per_step = len(one.seconds) / num_steps
        moved = one.moved_bytes(num_context_tokens)
        least_s = ceilings.least_s(moved, one.flops)
        total_s += per_step * one.median_s
        total_bytes += per_step * moved
        total_flops += per_step * one.flops
        programs["/".join(map(str, one.key))] = {
            "calls_per_step": per_step,
            "median_ms": one.median_s * 1e3,
            "ms_per_step": per_step * one.median_s * 1e3,
            "bytes_per_call": moved,
            "flops_per_call": one.flops,
            "least_ms": least_s * 1e3,
            "of_ceiling": least_s / one.median_s,
            "xla_flops": one.xla_flops,
            "xla_bytes": one.xla_bytes,
        }
    least_s = ceilings.least_s(total_bytes, total_flops)
    return {
        "stream_bytes_per_s": ceilings.stream_bytes_per_s,
        "gemm_flops_per_s": ceilings.gemm_flops_per_s,
        "num_steps": num_steps,
        "num_context_tokens": num_context_tokens,
        "ms_per_step": total_s * 1e3,
        "bytes_per_step": total_bytes,
        "flops_per_step": total_flops,
        "least_ms": least_s * 1e3,
        "of_ceiling": least_s / total_s,
        "programs": programs,
    }
