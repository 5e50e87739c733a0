"""From an argument list to parsed flags and positionals; every command of the CLI parses through here.

absl keeps the flags and checks their values. This module decides what is a flag and what is text,
because that is where three promises meet: hyphens are accepted for underscores in flag names, the same
holds inside --flagfile, and a value or a prompt is never changed. Invariant: absl is only ever given
`--name=value`, so it has nothing left to guess.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from absl import flags

from jaxserve.errors import JaxserveError

_SHORT_NAMES = {"h": "help", "?": "help"}
_LOOKS_LIKE_FLAG = re.compile(r"--|-[A-Za-z?]")


class UsageError(JaxserveError):
    """The command line is at fault; nothing was started."""


def parse_arguments(arguments: Sequence[str], flag_values: flags.FlagValues) -> list[str]:
    """Parses flags into `flag_values` and returns what is not a flag, in order.

    `--name=value`, `--name value` and, for booleans, `--name` and `--noname` are flags, before and
    after positionals. Everything behind `--` is text, and so is an argument like `-5 + 3` that cannot
    be a flag's name.

    Args:
        arguments: without the program's and the command's name.
        flag_values: the command's own flags; a string flag named "flagfile" among them.

    Returns:
        The positional arguments, unchanged.

    Raises:
        UsageError: an unknown flag (with a suggestion), a missing or bad value, an unreadable flagfile.
    """
    settings, positionals = _split(arguments, flag_values, ())
    try:
        flag_values(["jaxserve", *settings])
    except flags.Error as error:
        raise UsageError(str(error)) from None
    return positionals


def _split(
    arguments: Iterable[str], flag_values: flags.FlagValues, open_files: tuple[Path, ...]
) -> tuple[list[str], list[str]]:
    """The arguments as `--name=value` settings and positionals, with flagfiles put in where they stand."""
    settings: list[str] = []
    positionals: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            positionals.extend(rest)
        elif not _LOOKS_LIKE_FLAG.match(argument):
            positionals.append(argument)
        else:
            name, value = _name_and_value(argument, flag_values)
            if value is None:
                value = next(rest, None)
            if value is None:
                raise UsageError(f"--{name} needs a value")
            if name == "flagfile":
                inner = _split_file(Path(value).expanduser(), flag_values, open_files)
                settings.extend(inner[0])
                positionals.extend(inner[1])
            else:
                _check_boolean(name, value, flag_values)
                settings.append(f"--{name}={value}")
    return settings, positionals


def _check_boolean(name: str, value: str, flag_values: flags.FlagValues) -> None:
    """Says what a boolean flag takes; absl's own words are about "boolean flags" and "arguments"."""
    flag = flag_values[name]
    if not flag.boolean:
        return
    try:
        flag.parser.parse(value)
    except ValueError:
        wanted = flag.parser.syntactic_help or "true or false"
        raise UsageError(f"flag --{name}={value}: must be {wanted}") from None


def _name_and_value(argument: str, flag_values: flags.FlagValues) -> tuple[str, str | None]:
    """The flag's own name, and its value where the argument holds one (a boolean always does)."""
    typed, has_value, value = argument.lstrip("-").partition("=")
    name = typed.replace("-", "_")
    name = _SHORT_NAMES.get(name, name)
    if name in flag_values:
        if has_value:
            return name, value
        return name, "true" if flag_values[name].boolean else None
    positive = re.sub(r"^no_?", "", name)
    if positive != name and positive in flag_values and flag_values[positive].boolean:
        if has_value:
            raise UsageError(f"--{typed} takes no value, got {value!r}")
        return positive, "false"
    close = difflib.get_close_matches(name, list(flag_values), n=1)
    hint = f"; did you mean --{close[0]}?" if close else ""
    first, *value_behind = typed.split(maxsplit=1)
    if value_behind and first.replace("-", "_") in flag_values:
        hint = (
            f"; use --{first}={value_behind[0]}, or two lines in a flagfile and no quotes elsewhere"
        )
    elif value_behind:
        hint = "; put -- before a prompt that begins with a dash"
    raise UsageError(f"unknown flag {argument.split('=')[0]!r}{hint} (--help lists the flags)")


def _split_file(
    path: Path, flag_values: flags.FlagValues, open_files: tuple[Path, ...]
) -> tuple[list[str], list[str]]:
    """As `_split`, for a file of one argument a line; blank lines and those after # or // are skipped."""
    if path in open_files:
        itself = (
            "it" if path == open_files[-1] else f"--flagfile={path}"
        )  # its name stands in front
        raise UsageError(f"{itself} includes itself")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"cannot read --flagfile={path}: {reason}") from None
    lines = (line.strip(" \t\r") for line in text.split("\n"))
    arguments = [line for line in lines if line and not line.startswith(("#", "//"))]
    try:
        return _split(arguments, flag_values, (*open_files, path))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
