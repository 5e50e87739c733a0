"""`jaxserve replay`: runs a schedule log again and compares the tokens.

The engine's scheduler takes no part: the batches are made from the log. What decides the shapes (page
size, pages, limits, dtypes, attention backend) comes from the log's header, so there are no flags for it.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from absl import flags

from jaxserve.cli import text_engine
from jaxserve.cli.arguments import UsageError
from jaxserve.cli.command_line import read_command_line
from jaxserve.cli.flags import (
    configure_logging,
    define_compilation_cache,
    define_general,
    define_model,
)
from jaxserve.cli.records import fingerprint
from jaxserve.cli.standard_streams import write_stdout
from jaxserve.cli.stop_signals import StopSignals
from jaxserve.schedule.replay import ScheduleLog, replay
from jaxserve.schedule.schedule_log import LogHeader, ScheduleLogError

USAGE = """\
usage: jaxserve replay --model=DIR|FILE.gguf|NAME --schedule_log=FILE [flags]

Runs every step of a log that `jaxserve run` or `bench` wrote (--schedule_log) again, on an engine of the
same shapes and with no scheduling, and compares the tokens. A log that was cut short is replayed as far as
it goes, and the line that tells the result says so.
exit code: 0 the same tokens, 1 a token differs (which is said first), 2 could not be replayed, 130 or 143
stopped by SIGINT or SIGTERM
"""

logger = logging.getLogger("jaxserve.cli")


def replay_flags() -> flags.FlagValues:
    """The flags of this command."""
    values = flags.FlagValues()
    group = {"flag_values": values, "module_name": "replay"}
    define_model(values, "replay")
    flags.DEFINE_string("schedule_log", None, "The log.", **group)
    define_compilation_cache(values, "replay")
    define_general(values)
    return values


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0 the tokens are the same, 1 one differs.

    Raises:
        JaxserveError: the log, the model or the engine is at fault.
    """
    given = read_command_line(argv, replay_flags(), USAGE, needed=("model", "schedule_log"))
    if given is None:
        return 0
    configure_logging(given["verbosity"])
    cache_dir = given["compilation_cache_dir"]
    with StopSignals("before the replay was done"):
        return _replay(given["model"], given["schedule_log"], cache_dir)


def _replay(model: str, path: str, cache_dir: str) -> int:
    with faults_of(path):
        log = ScheduleLog(read_lines(path))
    header = log.header
    _check_model(model, header)
    options = header.engine_options()
    if cache_dir:
        options["compilation_cache_dir"] = str(Path(cache_dir).expanduser())
    llm = text_engine.load_llm(model, options)
    _check_engine(llm.engine, header)
    started = time.monotonic()
    with faults_of(path):
        done = replay(llm.engine.executor, log)
    if done.difference is not None:
        write_stdout(f"{done.difference}\n")
        return 1
    cut = (
        "" if done.is_whole else "; the log has no end: it was cut short or is still being written"
    )
    write_stdout(
        f"the same {done.num_tokens} tokens in {done.num_steps} steps, "
        f"{time.monotonic() - started:.1f} s{cut}\n"
    )
    return 0


@contextmanager
def faults_of(path: str) -> Iterator[None]:
    """What is wrong with a line, said with its file."""
    try:
        yield
    except ScheduleLogError as error:
        raise ScheduleLogError(f"{path}, {error}") from None


def read_lines(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as stream:
            yield from stream
    except OSError as error:
        raise UsageError(f"cannot read --schedule_log={path}: {error.strerror}") from None


def _check_model(model: str, header: LogHeader) -> None:
    if header.model is not None and fingerprint(model) != header.model:
        raise ScheduleLogError(
            f"--model={model} is another model than the one the log was made with"
        )


def _check_engine(engine: text_engine.EngineLike, header: LogHeader) -> None:
    """Refuses an engine that came out otherwise; a flag of another version perhaps."""
    stats = engine.stats()
    made = LogHeader.of(
        stats,
        version=header.jaxserve_version,
        model=header.model,
        host_kv_gib=header.host_kv_gib,
    )
    if made != header:
        name, then, now = next(
            (name, then, now)
            for (name, then), now in zip(vars(header).items(), vars(made).values(), strict=True)
            if then != now
        )
        raise ScheduleLogError(f"{name} was {then!r} in the log and would be {now!r} now")
