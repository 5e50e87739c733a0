"""`jaxserve bench offline`: replays a workload file; every request is submitted at once, and the engine
is stepped until all are done.

Called by `bench.py`. Invariant: all lines must be good, a measurement with holes means nothing; and no
repetition finds in the prefix cache what an earlier one computed.
"""

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from absl import flags

from jaxserve import __version__
from jaxserve.cli.arguments import UsageError
from jaxserve.cli.bench_arm import Arm, build_arm, make_compile_counter, measure_in_turns
from jaxserve.cli.bench_result import check_output, peak_rss_bytes, write_file, write_result
from jaxserve.cli.command_line import read_command_line
from jaxserve.cli.flag_types import define_integer
from jaxserve.cli.flags import (
    check_engine_options,
    configure_logging,
    define_engine,
    define_general,
    engine_options,
)
from jaxserve.cli.output_files import check_writable, is_same_file
from jaxserve.cli.records import EngineRecords, RecordFlags
from jaxserve.cli.request_line import LineParser, RequestLine
from jaxserve.cli.run_input import open_input
from jaxserve.cli.run_output import encode_record
from jaxserve.cli.scheduling_flags import define_records
from jaxserve.cli.stop_signals import StopSignals
from jaxserve.config import SCHEDULING, EngineConfig

USAGE = """\
usage: jaxserve bench offline --model=DIR|FILE.gguf|NAME --workload=FILE.jsonl [flags]

Submits all requests of the workload at once and prints one JSON object: output_tokens_per_s,
total_tokens_per_s, wall_s (medians over the repetitions), ttft_s, itl_s and e2el_s (percentiles over
all requests of all repetitions), compiles_after_warmup, padding_waste (padding tokens / all tokens
computed), peak_rss_bytes, startup, and what was run; numbers have 6 significant digits. A workload line
is a line as `jaxserve run` takes it. --scheduling=static,continuous measures both in turns, each with an
engine of its own, and puts the figures under "arms". Stopped by a signal once each has a repetition, it
gives the result of those that are done, with "partial": true.
exit code: 0 measured, 2 could not be measured, 130 or 143 stopped by SIGINT or SIGTERM
"""


WORKLOADS = Path(__file__).resolve().parents[2] / "scripts" / "workloads"  # of a checkout


def offline_flags() -> flags.FlagValues:
    """The flags of `bench offline`."""
    values = flags.FlagValues()
    group = {"flag_values": values, "module_name": "measurement"}
    flags.DEFINE_string("workload", None, "JSON lines, as `jaxserve run` takes them.", **group)
    define_integer("repetitions", 1, "How often to replay it.", lower_bound=1, **group)
    flags.DEFINE_list(
        "scheduling",
        EngineConfig().scheduler.scheduling,
        f"{' or '.join(SCHEDULING)}, or both with a comma, to measure them in turns.",
        **group,
    )
    flags.DEFINE_string("output", None, "Write the JSON object to this file as well.", **group)
    flags.DEFINE_string(
        "outputs", None, "Write id, output_ids and logprobs of each request, JSON lines.", **group
    )
    define_engine(values)
    define_records(values)
    define_general(values)
    return values


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0; 130 or 143 where a signal left a part of the repetitions undone.

    Raises:
        JaxserveError: it could not be measured.
    """
    values = offline_flags()
    given = read_command_line(argv, values, USAGE, needed=("model", "workload"))
    if given is None:
        return 0
    _check_outputs(given)
    records = _records(given)
    configure_logging(given["verbosity"])
    with StopSignals("before a repetition was done: there is no result") as stop:
        is_whole = _measure_and_write(given, engine_options(values), records, stop)
    return 0 if is_whole else stop.exit_code


def _records(given: dict[str, Any]) -> RecordFlags:
    """The files that record what the engine does, checked."""
    taken = {name: given[name] for name in ("workload", "output", "outputs")}
    records = RecordFlags.from_flags(given, taken)
    if records.any and len(given["scheduling"]) > 1:
        raise UsageError("--stats_file and --schedule_log are for one arm of --scheduling")
    return records


def _check_outputs(given: dict[str, Any]) -> None:
    """Refuses files that would destroy the workload or each other, and a result that nobody would see."""
    names = [name for name in ("output", "outputs") if given[name]]
    for name in names:
        if is_same_file(Path(given[name]), given["workload"]):
            raise UsageError(f"--{name}={given[name]} is the workload itself")
    if len(names) == 2 and Path(given["output"]).resolve() == Path(given["outputs"]).resolve():
        raise UsageError(f"--output and --outputs are the same file, {given['output']}")
    check_output(given["output"])
    if given["outputs"]:
        check_writable("outputs", given["outputs"])


def _measure_and_write(
    given: dict[str, Any], options: dict[str, Any], records: RecordFlags, stop: StopSignals
) -> bool:
    """Whether all repetitions were done."""
    arms = _arm_options(options)
    lines = read_workload(given["workload"], seed=given["seed"], logprobs=bool(given["outputs"]))
    built = [build_arm(given["model"], one) for one in arms]
    compiles = make_compile_counter()  # after the last engine was built: that compiles too
    with EngineRecords(records, built[0].llm.engine, given["model"], arms[0]):
        measure_in_turns(built, lines, compiles, given["repetitions"], stop)
    stop.defer()  # what follows is short, and no file is left half-written
    if given["outputs"]:
        write_file(given["outputs"], b"".join(_output_records(lines, built[0])))
    result = _result(given, lines, built)
    write_result(result, given["output"])
    return not result["partial"]


def _arm_options(options: dict[str, Any]) -> list[dict[str, object]]:
    """The engine options of each arm, checked."""
    arms = [{**options, "scheduling": name} for name in options["scheduling"]]
    for one in arms:
        check_engine_options(one)
    if not arms or len(set(options["scheduling"])) != len(arms):
        raise UsageError(f"--scheduling must name different arms, got {options['scheduling']}")
    return arms


def read_workload(path: str, *, seed: int, logprobs: bool) -> list[RequestLine]:
    """The workload's requests.

    Args:
        path: the file.
        seed: for lines that sample without a seed of their own.
        logprobs: ask for logprobs in every line.

    Raises:
        UsageError: the file cannot be read, is empty, or a line of it is at fault.
    """
    sampling = {"logprobs": True} if logprobs else {}
    parser = LineParser(sampling, seed=seed)
    lines = [parser.parse(index, data) for index, data in enumerate(_lines(path))]
    if not lines:
        raise UsageError(f"--workload={path} holds no requests")
    for line in lines:
        if line.error is not None:
            raise UsageError(f"--workload={path}: line {line.index + 1}: {line.error.message}")
        if line.params.n > 1:
            raise UsageError(
                f"--workload={path}: line {line.index + 1}: n must be 1, got {line.params.n}: what is "
                "measured is the time between the tokens of one output"
            )
    return lines


def _lines(path: str) -> Iterator[bytes]:
    try:
        source = open_input(path, flag="--workload").lines
    except UsageError as error:
        raise UsageError(f"{error}{_where_instead(path)}") from None
    while not source.exhausted:
        line = source.next_line(wait=True)
        if line is not None:
            yield line


def _where_instead(path: str) -> str:
    """A hint at the workload of that name in the checkout, for a file that is not there; else ""."""
    for name in (Path(path).name, f"{Path(path).name}.jsonl"):
        found = WORKLOADS / name
        if found.is_file() and not Path(path).exists():
            inside = found.is_relative_to(Path.cwd())
            return f"; did you mean {str(found.relative_to(Path.cwd()) if inside else found)!r}?"
    return ""


def _result(
    given: dict[str, Any], lines: Sequence[RequestLine], arms: Sequence[Arm]
) -> dict[str, Any]:
    num_done = len(arms[0].repetitions)
    result: dict[str, Any] = {
        "model": given["model"],
        "workload": Path(given["workload"]).name,
        "num_requests": len(lines),
        "num_repetitions": num_done,
        "partial": num_done < given["repetitions"],
        "jaxserve_version": __version__,
        "jax_version": version("jax"),
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if len(arms) == 1:
        return {**result, **arms[0].summary()}
    return {**result, "arms": {str(arm.options["scheduling"]): arm.summary() for arm in arms}}


def _output_records(lines: Sequence[RequestLine], arm: Arm) -> Iterator[bytes]:
    """What the last repetition generated, one line a request."""
    for line, timeline in zip(lines, arm.repetitions[-1].timelines, strict=True):
        output = {"output_ids": timeline.token_ids, "logprobs": timeline.logprobs}
        line_id = line.index if line.id is None else line.id
        yield encode_record({"id": line_id, **output})
