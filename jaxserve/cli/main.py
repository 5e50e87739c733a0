"""`jaxserve COMMAND ...`: finds the command, runs it, and turns every ending into an exit code.

The console script, `python -m jaxserve` and the scripts call `main`. A command's module is imported when
it is asked for, and imports jax only when it has work for it: --help and a mistyped flag answer at once.
"""

import difflib
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from jaxserve import __version__
from jaxserve.errors import JaxserveError

# Command -> (module with `main(argv) -> exit code`, how it is typed, what it does).
COMMANDS = {
    "run": ("jaxserve.cli.run", "run", "generate text for prompts, or for the lines of a file"),
    "bench": ("jaxserve.cli.bench", "bench offline", "measure: replay a workload"),
    "fetch": ("jaxserve.cli.fetch", "fetch NAME", "download a checkpoint by name"),
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
        argv: the arguments without the program's name; None = those of the process.

    Returns:
        0 all good, 1 some of the work failed, 2 it could not be done (one line on stderr says why),
        130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name in ("--help", "--helpfull", "-h", "help"):
        print(_help())
        return EXIT_OK
    if name in ("--version", "version"):
        print(f"jaxserve {__version__}")
        return EXIT_OK
    if name not in COMMANDS:
        return _refuse(name)
    return _guarded(name, arguments[1:])


def _refuse(name: str) -> int:
    if not name:
        print(_help(), file=sys.stderr)
        return EXIT_COULD_NOT_RUN
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    kind = "flag" if name.startswith("-") else "command"
    print(
        f"jaxserve: unknown {kind} {name!r}; {hint}commands: {', '.join(COMMANDS)}", file=sys.stderr
    )
    return EXIT_COULD_NOT_RUN


def _guarded(name: str, arguments: list[str]) -> int:
    """Runs a command; no error of it reaches the user as a traceback, unless --verbosity=1 asks for one."""
    try:
        code = importlib.import_module(COMMANDS[name][0]).main(arguments)
        sys.stdout.flush()  # here, where a closed pipe can still be reported
        return code
    except BrokenPipeError as error:
        _leave_stdout()
        return _fail(name, error, "stdout was closed before the end")
    except JaxserveError as error:
        return _fail(name, error, str(error))
    except KeyboardInterrupt:
        print(f"jaxserve {name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last frame before the user: a traceback is no answer
        return _fail(name, error, f"{type(error).__name__}: {error}")


def _fail(name: str, error: Exception, message: str) -> int:
    logger.debug("where it came from:", exc_info=error)
    print(f"jaxserve {name}: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_COULD_NOT_RUN


def _leave_stdout() -> None:
    """Points stdout at nothing, so that the interpreter's last flush cannot fail as well."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
