"""The files that a run's output consists of, and what may not be used as one.

    OUTPUT   OUTPUT.partial.jsonl   OUTPUT.meta.json   and, for a moment, the .tmp of the last two

Used by every command that writes a file. Invariant: what `check_output_file` lets through, a run may
create, replace and delete without touching a file that it reads.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from jaxserve.cli.arguments import UsageError
from jaxserve.errors import JaxserveError

_STDIN, _STDOUT = 0, 1


class OutputError(JaxserveError):
    """The output cannot be written."""


def partial_path(output: Path) -> Path:
    """Where finished records wait for their turn."""
    return output.with_name(output.name + ".partial.jsonl")


def meta_path(output: Path) -> Path:
    """Where the identity of the run that made an output is kept."""
    return output.with_name(output.name + ".meta.json")


def scratch_path(path: Path) -> Path:
    """Where the next content of a file is written before it takes the file's place."""
    return path.with_name(path.name + ".tmp")


def is_stream(output: str) -> bool:
    """Whether an --output cannot be kept and continued: stdout, or a path that is a pipe or a device."""
    if output == "-":
        return True
    try:
        mode = os.stat(output).st_mode
    except OSError:  # there is none yet, or its name is not possible: `check_output_file` says so
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def is_same_file(path: Path, source: str) -> bool:
    """Whether a path is, by whatever name or link, the file that is read.

    Args:
        path: of a file to be written.
        source: what is read: a path, or "-" for stdin.
    """
    try:
        read = os.fstat(_STDIN) if source == "-" else os.stat(source)
        return os.path.samestat(read, os.stat(path))
    except OSError:
        return False  # one of them does not exist


def appends_to_itself(source: str) -> bool:
    """Whether stdout goes to the very file that is read: such a run would never come to its end."""
    try:
        read = os.fstat(_STDIN) if source == "-" else os.stat(source)
        written = os.fstat(_STDOUT)
    except OSError:
        return False
    return stat.S_ISREG(read.st_mode) and os.path.samestat(read, written)


def check_output_file(output: Path, source: str | None) -> None:
    """Refuses an output that could not be written, or whose files would destroy what is read.

    Args:
        output: the output, a file that may exist.
        source: the input, a path or "-" for stdin; None for none.

    Raises:
        UsageError: says what is wrong with the name.
    """
    if os.path.isdir(output) or not os.path.isdir(output.parent):  # False where Path's would raise
        raise UsageError(f"cannot write --output={output}: not a file in an existing directory")
    longest = max(len(os.fsencode(path.name)) for path in all_files(output))
    limit = os.pathconf(output.parent, "PC_NAME_MAX")
    if longest > limit:
        spare = longest - len(os.fsencode(output.name))
        raise UsageError(
            f"cannot write --output={output}: its name is {longest - spare} bytes long, the limit here is "
            f"{limit - spare} ({limit} less what {partial_path(Path('OUTPUT')).name}.tmp adds)"
        )
    if source is None:
        return
    if is_same_file(output, source):
        raise UsageError(f"--output={output} is the input itself")
    for path in all_files(output):
        if is_same_file(path, source):
            raise UsageError(
                f"--output={output} keeps a file of its own at {path}, and that is the input: "
                "give another --output"
            )


def check_writable(flag: str, path: str) -> None:
    """Refuses a file that cannot be written, before there is something to write.

    Args:
        flag: whose value it is. path: of a file that may exist, a pipe or a device.

    Raises:
        UsageError: says why.
    """
    try:
        is_new = not os.path.lexists(path)
        if is_new or stat.S_ISREG(os.stat(path).st_mode):
            open(path, "ab").close()
        elif os.path.isdir(path):
            raise IsADirectoryError(None, "Is a directory")
        if is_new:
            os.unlink(path)  # a start that fails later leaves nothing behind
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot write --{flag}={path}: {reason}") from None


def all_files(output: Path) -> Iterator[Path]:
    """The output, and the files that are kept beside it."""
    yield output
    for path in (partial_path(output), meta_path(output)):
        yield path
        yield scratch_path(path)
