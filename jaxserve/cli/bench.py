"""`jaxserve bench KIND`: finds the measurement and runs it.

Called by `main.py`. Each kind is a module with `main(argv) -> exit code` that prints one JSON object, and
is imported when it is asked for.
"""

import difflib
import importlib
from collections.abc import Sequence

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.standard_streams import write_stdout

# Kind -> (module, what it measures).
KINDS = {
    "offline": ("jaxserve.cli.bench_offline", "throughput and latencies of a workload file"),
    "latency": (
        "jaxserve.cli.bench_latency",
        "time to the first token and between tokens at one batch size; where a step's time goes",
    ),
    "kernels": (
        "jaxserve.cli.bench_kernels",
        "attention backends against each other and against what the machine can do",
    ),
    "serve": ("jaxserve.cli.bench_serve", "what the clients of a running server see under load"),
    "capacity": (
        "jaxserve.cli.bench_capacity",
        "the highest request rate at which a running server keeps limits",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Runs one kind of measurement.

    Returns:
        0.

    Raises:
        JaxserveError: it could not be measured.
    """
    kind = argv[0] if argv else ""
    if kind in ("--help", "--helpfull", "-h"):
        write_stdout(_help())
        return 0
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"name what to measure, {', '.join(KINDS)}, before the flags{hint}")
    return importlib.import_module(KINDS[kind][0]).main(argv[1:])


def _help() -> str:
    lines = "\n".join(f"  {kind:<10}{text}" for kind, (_, text) in KINDS.items())
    return (
        "usage: jaxserve bench KIND [flags]\n       jaxserve bench KIND --help\n\n"
        f"measures and prints one JSON object:\n{lines}\n"
    )
