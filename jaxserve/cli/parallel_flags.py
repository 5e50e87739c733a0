"""The flags of `run` and `serve` that say which devices, and which processes, share the work; and what a
process that follows another does.

Invariant: only here does a command end its process at once: where another process is gone, what waits for it
never returns, and libraries wait for it too when they are torn down.
"""

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Protocol

from absl import flags

from jaxserve.cli.flag_types import define_integer
from jaxserve.cli.standard_streams import say
from jaxserve.config import EngineConfig
from jaxserve.errors import JaxserveError

PARALLEL_OPTIONS = ("data_parallel_size", "coordinator_address", "num_processes", "process_id")
EXIT_COULD_NOT_RUN = 2

logger = logging.getLogger("jaxserve.cli")


class _Closes(Protocol):
    def close(self) -> str | None: ...


def define_parallel(flag_values: flags.FlagValues) -> None:
    """--data_parallel_size and those of several processes."""
    group = {"flag_values": flag_values, "module_name": "devices and processes"}
    default = EngineConfig()
    define_integer(
        "data_parallel_size",
        default.parallel.data_parallel_size,
        "Copies of the model, each on devices of its own, behind one queue.",
        **group,
    )
    flags.DEFINE_string(
        "coordinator_address",
        default.processes.coordinator_address,
        "host:port of process 0, as the others reach it. Start the same command in every process, each "
        "with its --process_id.",
        **group,
    )
    define_integer(
        "num_processes",
        default.processes.num_processes,
        "Processes that share the model, with all of their devices.",
        **group,
    )
    define_integer(
        "process_id",
        default.processes.process_id,
        "Which of them this is; 0 reads the input, or serves, and the others do as it says.",
        **group,
    )


def follows(options: Mapping[str, object]) -> bool:
    """Whether this process does what another one says."""
    return options["process_id"] != 0


def have_others(options: Mapping[str, object]) -> bool:
    """Whether other processes follow, or lead, this one."""
    return options["num_processes"] != 1


def follow(model: str, options: Mapping[str, Any]) -> int:
    """Runs this process's part until process 0 ends.

    Returns:
        0, when it has ended in order; else the process ends here.
    """
    from jaxserve.follower import follow_leader

    try:
        follow_leader(model, on_lost=_leave, **options)
    except (JaxserveError, KeyboardInterrupt) as error:
        _leave(str(error) or "interrupted")
    return 0


@contextlib.contextmanager
def joining(options: Mapping[str, object]) -> Iterator[None]:
    """Around what meets the other processes: if it fails, this process ends without waiting for them."""
    try:
        yield
    except BaseException:
        if have_others(options):  # registered last, so it comes before what jax has registered
            atexit.register(_leave)
        raise


def end_others_at_exit(llm: _Closes) -> None:
    """Tells the followers of an `LLM` that the run is over, when this process ends."""

    def end() -> None:
        lost = llm.close()
        if lost is not None:
            _leave(lost)

    atexit.register(end)


def _leave(reason: str | None = None) -> NoReturn:
    if reason is not None:
        say(f"jaxserve: {reason}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_COULD_NOT_RUN)
