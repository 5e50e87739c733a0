"""stdin, stdout and stderr as they may really be: closed, full, or a pipe that nobody reads any more.

`main` calls `fill_closed` before anything else; commands print by `write_stdout` and `say`. Invariant: no
file that is opened later takes the place of a closed stream, so nothing printed ends up in an output.
"""

import os
import sys
from typing import TextIO

from jaxserve.cli.output_files import OutputError


def fill_closed() -> None:
    """Puts the null device where a standard stream is closed.

    Without that the next file to be opened would become the stream, for every library that prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = _null_stream()
    if sys.stderr is None:
        sys.stderr = _null_stream()


def _null_stream() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def is_stdin_closed() -> bool:
    """Whether the process was started without a stdin."""
    return sys.stdin is None


def is_stdout_closed() -> bool:
    """Whether the process was started without a stdout, so that `fill_closed` filled its place."""
    return sys.__stdout__ is None and getattr(sys.stdout, "name", None) == os.devnull


def write_stdout(text: str) -> None:
    """Prints text, as it is, at once.

    Raises:
        OutputError: it cannot be written; stdout then goes nowhere, so that the interpreter's own last
            flush does not fail as well.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        abandon(sys.stdout)
        raise write_error("stdout", error) from None


def write_error(name: str, error: OSError) -> OutputError:
    """The error to raise for a write that failed.

    Args:
        name: of the stream or file.
        error: what the system said.
    """
    if isinstance(error, BrokenPipeError):
        return OutputError(f"{name} was closed before the end")
    return OutputError(f"cannot write {name}: {error.strerror}")


def say(text: str) -> None:
    """Prints a line on stderr. One that cannot be written is lost: no work is given up for a message."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        abandon(sys.stderr)


def abandon(stream: TextIO) -> None:
    """Points a stream that cannot be written, and what it still holds, at the null device."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)
