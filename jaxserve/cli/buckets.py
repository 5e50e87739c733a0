"""`jaxserve buckets`: proposes ladders of shapes for a workload, from the steps that a schedule log holds.

No model is loaded and nothing is run.
"""

from collections import Counter
from collections.abc import Sequence

from absl import flags

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.command_line import read_command_line
from jaxserve.cli.flag_types import define_auto_integer, define_float
from jaxserve.cli.flags import define_general
from jaxserve.cli.schedule_replay import faults_of, read_lines
from jaxserve.cli.standard_streams import write_stdout
from jaxserve.schedule.bucket_choice import padding_share, suggest_buckets
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.replay import ScheduleLog

USAGE = """\
usage: jaxserve buckets --schedule_log=FILE [flags]

Reads a log that `jaxserve run` or `bench` wrote (--schedule_log), and proposes the ladders of tokens and
of rows for which its steps would have been padded least: as many rungs as the log's own had, or as the
flags say. Prints what padding was and would have been, and the flags for `run` and `bench`.
exit code: 0 done, 2 the log or a flag is at fault
"""


def buckets_flags() -> flags.FlagValues:
    """The flags of this command."""
    values = flags.FlagValues()
    group = {"flag_values": values, "module_name": "buckets"}
    flags.DEFINE_string("schedule_log", None, "The log.", **group)
    define_auto_integer(
        "num_token_buckets",
        "Most rungs of the ladder of tokens; auto = as many as it had.",
        **group,
    )
    define_auto_integer(
        "num_row_buckets", "Most rungs of the ladder of rows; auto = as many as it had.", **group
    )
    define_float(
        "bucket_cost",
        0.0,
        "Padded tokens (or rows) over the whole log that a further rung has to save to be worth its "
        "programs.",
        **group,
    )
    define_general(values)
    return values


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Raises:
        JaxserveError: the log or a flag is at fault.
    """
    given = read_command_line(argv, buckets_flags(), USAGE, needed=("schedule_log",))
    if given is None:
        return 0
    path = given["schedule_log"]
    for name in ("num_token_buckets", "num_row_buckets"):
        if given[name] is not None and given[name] < 1:
            raise UsageError(f"--{name} must be at least 1, got {given[name]}")
    if given["bucket_cost"] < 0:
        raise UsageError(f"--bucket_cost must be at least 0, got {given['bucket_cost']}")
    with faults_of(path):
        log = ScheduleLog(read_lines(path))
        steps = count_steps(log)
    if not steps:
        raise UsageError(f"--schedule_log={path} holds no step")
    proposed = suggest_buckets(
        steps,
        max_num_seqs=log.buckets.max_num_seqs,
        max_num_batched_tokens=log.buckets.max_num_batched_tokens,
        num_token_rungs=given["num_token_buckets"] or len(log.buckets.tokens),
        num_row_rungs=given["num_row_buckets"] or len(log.buckets.rows),
        rung_cost=given["bucket_cost"],
    )
    write_stdout(_report(steps, log.buckets, proposed))
    return 0


def count_steps(log: ScheduleLog) -> Counter[tuple[int, int]]:
    """(tokens, rows that sample) of a step -> how many were like that; several steps in one count each."""
    steps: Counter[tuple[int, int]] = Counter()
    for step in log.steps():
        num_rows = sum(one.num_samples > 0 for one in step.plan.slices)
        steps[step.plan.num_tokens, num_rows] += step.plan.num_steps
    return steps


def _report(steps: Counter[tuple[int, int]], now: Buckets, proposed: Buckets) -> str:
    sizes: dict[str, Counter[int]] = {"token": Counter(), "row": Counter()}
    for (num_tokens, num_rows), count in steps.items():
        sizes["token"][num_tokens] += count
        if num_rows:
            sizes["row"][num_rows] += count
    lines = [f"{sum(steps.values())} steps"]
    rungs = {}
    for name, old, new in (
        ("token", now.tokens, proposed.tokens),
        ("row", now.rows, proposed.rows),
    ):
        before, after = (padding_share(sizes[name], ladder) for ladder in (old, new))
        rungs[name] = ",".join(map(str, new))
        lines.append(
            f"{name}s: {before:.1%} padding with {len(old)} rungs ({','.join(map(str, old))}), "
            f"{after:.1%} with these {len(new)}:"
        )
        lines.append(f"--{name}_buckets={rungs[name]}")
    return "\n".join(lines) + "\n"
