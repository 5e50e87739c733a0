"""`jaxserve fetch NAME`: downloads a checkpoint by name, or lists the names.

Run by `cli/main.py`, which turns the errors into one line and exit code 2. The work is done in
`weights/fetch.py`.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxserve.cli.arguments import UsageError, parse_arguments
from jaxserve.cli.flags import define_general, help_text, wants_help
from jaxserve.cli.standard_streams import say, write_stdout
from jaxserve.weights.fetch import fetch
from jaxserve.weights.manifest import manifest_folder, manifest_names, read_manifest

_USAGE = """\
usage: jaxserve fetch NAME [NAME ...] [flags]

Downloads checkpoints. NAME is one of the names below, or org/name on the Hugging Face hub. In a source
checkout it goes to ./checkpoints; elsewhere to the user's cache folder, unless --model=NAME would find
it already: then that place is named and nothing is downloaded.
exit code: 0 all of them are there, 2 one could not be fetched, 130 interrupted
"""


def _define_flags() -> flags.FlagValues:
    flag_values = flags.FlagValues()
    flags.DEFINE_string(
        "dest",
        None,
        "Folder to put it in, as DEST/NAME.",
        flag_values=flag_values,
        module_name="fetch",
    )
    define_general(flag_values)
    return flag_values


def _names() -> str:
    manifests = [read_manifest(manifest_folder() / f"{name}.toml") for name in manifest_names()]
    return "".join(f"  {m.name}  {m.description} ({m.licence})\n" for m in manifests)


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: the arguments behind `fetch`.

    Returns:
        0 when every checkpoint is there.

    Raises:
        UsageError: no name, or a flag that is not known.
        CheckpointError: a checkpoint could not be fetched; nothing half-made is left.
    """
    flag_values = _define_flags()
    names = parse_arguments(argv, flag_values)
    if wants_help(flag_values):
        write_stdout(help_text(f"{_USAGE}\nnames:\n{_names()}", flag_values) + "\n")
        return 0
    if not names:
        raise UsageError(
            f"give the name of a checkpoint: {', '.join(manifest_names())}, or org/name on the hub"
        )
    destination = None if flag_values.dest is None else Path(flag_values.dest).expanduser()
    for name in names:
        fetch(name, destination, report=say)
    return 0
