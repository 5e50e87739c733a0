"""The command line of a command that takes flags and nothing else: they are parsed, --help is answered.

Called first by the `main` of such a command. Apart from `arguments`, which knows no stream: this prints.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags

from jaxserve.cli.arguments import UsageError, parse_arguments
from jaxserve.cli.flags import help_text, wants_help
from jaxserve.cli.standard_streams import write_stdout


def read_command_line(
    argv: Sequence[str], flag_values: flags.FlagValues, usage: str, *, needed: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Parses a command's flags into `flag_values`, and prints its help where that is asked for.

    Args:
        argv: the arguments behind the command's name.
        flag_values: the command's own flags.
        usage: what --help prints before them.
        needed: names of flags that must have a value.

    Returns:
        The flags by name; None once --help is answered and nothing is left to do.

    Raises:
        UsageError: as `parse_arguments`; an argument that is no flag; a needed flag without a value.
    """
    unexpected = parse_arguments(argv, flag_values)
    if wants_help(flag_values):
        write_stdout(help_text(usage, flag_values) + "\n")
        return None
    if unexpected:
        raise UsageError(f"unexpected argument {unexpected[0]!r}")
    given: dict[str, Any] = flag_values.flag_values_dict()
    for name in needed:
        if not given[name]:
            raise UsageError(f"--{name} is needed: {_as_end(flag_values[name].help)}")
    return given


def _as_end(text: str) -> str:
    """A help text as the end of a sentence; a word in capitals stays so."""
    begins_a_word = text[1:2].islower() or text[1:2] == " "
    return (text[:1].lower() + text[1:] if begins_a_word else text).rstrip(".")
