"""`jaxserve COMMAND ...`: finds the command, runs it, and turns every ending into an exit code.

The console script, `python -m jaxserve` and the scripts call `main`. A command's module is imported when
it is asked for, and imports jax only when it has work for it: --help and a mistyped flag answer at once.
"""

import contextlib
import difflib
import importlib
import logging
import sys
from collections.abc import Callable, Sequence

from jaxserve import __version__
from jaxserve.cli.output_files import OutputError
from jaxserve.cli.standard_streams import fill_closed, say, write_stdout
from jaxserve.cli.stop_signals import kept_signals
from jaxserve.errors import JaxserveError

# Command -> (module with `main(argv) -> exit code`, how it is typed, what it does).
COMMANDS = {
    "run": ("jaxserve.cli.run", "run", "generate text for prompts, or for the lines of a file"),
    "serve": ("jaxserve.cli.serve", "serve", "serve a model over HTTP, as OpenAI's API does"),
    "bench": (
        "jaxserve.cli.bench",
        "bench KIND",
        "measure: offline, latency, kernels, serve, capacity",
    ),
    "replay": ("jaxserve.cli.schedule_replay", "replay", "run a schedule log again and compare"),
    "buckets": (
        "jaxserve.cli.buckets",
        "buckets",
        "propose shapes to compile, from a schedule log",
    ),
    "plan": ("jaxserve.cli.plan", "plan", "say whether a model fits chips, and how fast at best"),
    "simulate": ("jaxserve.cli.simulate", "simulate", "replay a trace on the scheduler alone"),
    "fetch": ("jaxserve.cli.fetch", "fetch NAME", "download a checkpoint by name"),
    "convert": (
        "jaxserve.cli.convert",
        "convert SRC DST",
        "write a checkpoint in another format or dtype",
    ),
}
EXIT_OK, EXIT_SOME_FAILED, EXIT_COULD_NOT_RUN, EXIT_INTERRUPTED = 0, 1, 2, 130

logger = logging.getLogger("jaxserve")


def _help() -> str:
    lines = "\n".join(f"  {typed:<15}{text}" for _, typed, text in COMMANDS.values())
    return (
        "jaxserve: LLM inference in pure JAX\n\n"
        "usage: jaxserve COMMAND [flags] ...\n"
        f"       jaxserve COMMAND --help | --version\n\ncommands:\n{lines}\n\n"
        "exit code: 0 all good, 1 some of the work failed, 2 it could not be done, 130 interrupted\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments without the program's name; None = those of the process, which is then
            taken to end with this call: signals no longer change its exit code once that is decided.

    Returns:
        0 all good, 1 some of the work failed, 2 it could not be done (one line on stderr says why),
        130 interrupted.
    """
    fill_closed()
    if argv is None:
        return _run_command(sys.argv[1:])
    with kept_signals():
        return _run_command(list(argv))


def _run_command(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in ("--help", "--helpfull", "-h", "help"):
        return _guarded("jaxserve", lambda: _print(_help() + "\n"))
    if name in ("--version", "version"):
        return _guarded("jaxserve", lambda: _print(f"jaxserve {__version__}\n"))
    if name not in COMMANDS:
        return _refuse(name)
    return _guarded(
        f"jaxserve {name}", lambda: importlib.import_module(COMMANDS[name][0]).main(arguments[1:])
    )


def _print(text: str) -> int:
    write_stdout(text)
    return EXIT_OK


def _refuse(name: str) -> int:
    if not name:
        say(_help())
        return EXIT_COULD_NOT_RUN
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    kind = "flag" if name.startswith("-") else "command"
    say(f"jaxserve: unknown {kind} {name!r}; {hint}commands: {', '.join(COMMANDS)}")
    return EXIT_COULD_NOT_RUN


def _guarded(title: str, command: Callable[[], int]) -> int:
    """Runs a command; no error of it reaches the user as a traceback, unless --verbosity=1 asks for one."""
    try:
        code = command()
        write_stdout("")  # flushes, here, where a failure can still be reported
        return code
    except JaxserveError as error:
        return _fail(title, error, str(error))
    except KeyboardInterrupt:
        say(f"{title}: interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last frame before the user: a traceback is no answer
        return _fail(title, error, f"{type(error).__name__}: {error}")


def _fail(title: str, error: Exception, message: str) -> int:
    with contextlib.suppress(OutputError):
        write_stdout(
            ""
        )  # what a failed write left behind must not fail the interpreter's last flush
    logger.debug("where it came from:", exc_info=error)
    say(f"{title}: {' '.join(message.split())}")
    return EXIT_COULD_NOT_RUN
