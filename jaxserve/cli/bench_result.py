"""How every kind of `bench` gives its result: one JSON object on stdout, and in a file if asked.

Invariant: numbers have as many digits as mean anything, and a result that nobody would see is refused
before anything is measured.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.output_files import check_writable
from jaxserve.cli.standard_streams import is_stdout_closed, write_error, write_stdout

_SIGNIFICANT_DIGITS = 6


def check_output(output: str | None) -> None:
    """Refuses a result that nobody would see.

    Args:
        output: the value of --output.

    Raises:
        UsageError: the file cannot be written, or there is no stdout and no file.
    """
    if output:
        check_writable("output", output)
    if is_stdout_closed() and not output:
        raise UsageError("cannot write stdout: it is closed; give --output=FILE")


def write_result(result: dict[str, Any], output: str | None) -> None:
    """Prints the result and writes it to the file `output` as well, if that is given.

    Raises:
        OutputError: it cannot be written.
    """
    text = json.dumps(rounded(result), indent=2, allow_nan=False) + "\n"
    if output:
        write_file(output, text.encode())
    write_stdout(text)


def write_file(path: str, data: bytes) -> None:
    """Writes a file; raises OutputError where that fails."""
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise write_error(path, error) from None


def rounded(value: Any) -> Any:
    """The same JSON value, every float in it cut to as many digits as mean anything."""
    if isinstance(value, float):
        return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def peak_rss_bytes() -> int:
    """Most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
