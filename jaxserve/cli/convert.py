"""`jaxserve convert SRC DST`: writes a checkpoint in another format, or another dtype.

Run by `cli/main.py`, which turns the errors into one line and exit code 2. The work is done in
`weights/convert.py`.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxserve.cli.arguments import UsageError, parse_arguments
from jaxserve.cli.flag_types import define_float
from jaxserve.cli.flags import define_general, help_text, wants_help
from jaxserve.cli.standard_streams import say, write_stdout
from jaxserve.weights.convert import DTYPES, FORMATS, convert
from jaxserve.weights.safetensors_writer import MAX_SHARD_BYTES

_GROUP = "convert"
_GIB = 1 << 30
_USAGE = """\
usage: jaxserve convert SRC DST [flags]

Reads the checkpoint SRC (a Hugging Face directory, an Orbax checkpoint with its config.json, a .gguf file,
or a name that was fetched) and writes it to the new folder DST, with its config and tokenizer: as
safetensors with Hugging Face names, which jaxserve and transformers read, or as an Orbax checkpoint of the
params tree in DST/params. DST appears once it is whole; one tensor at a time is in memory.
exit code: 0 DST is there, 2 it could not be written, 130 interrupted
"""


def _define_flags() -> flags.FlagValues:
    flag_values = flags.FlagValues()
    group = {"flag_values": flag_values, "module_name": _GROUP}
    flags.DEFINE_enum("format", None, list(FORMATS), "What to write; must be given.", **group)
    flags.DEFINE_enum(
        "dtype",
        "auto",
        ["auto", *DTYPES],
        "Of the weights that are written; auto = as stored, float32 for what is quantised.",
        **group,
    )
    define_float(
        "max_shard_gib",
        MAX_SHARD_BYTES / _GIB,
        "Most GiB of a safetensors file, as far as one tensor fits.",
        **group,
    )
    define_general(flag_values)
    return flag_values


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: the arguments behind `convert`.

    Returns:
        0 when DST is there.

    Raises:
        UsageError: no SRC or DST, or a flag with a value that it cannot have.
        CheckpointError: SRC is no model that is served, or DST cannot be written; nothing half-made is
            left.
    """
    flag_values = _define_flags()
    positionals = parse_arguments(argv, flag_values)
    if wants_help(flag_values):
        write_stdout(help_text(_USAGE, flag_values) + "\n")
        return 0
    if len(positionals) != 2:
        raise UsageError(f"give SRC and DST, two arguments; got {len(positionals)}")
    if flag_values.format is None:
        raise UsageError(f"give --format={' or --format='.join(FORMATS)}")
    if not 0 < flag_values.max_shard_gib < float("inf"):
        raise UsageError(f"--max_shard_gib must be above 0, got {flag_values.max_shard_gib}")
    if flag_values["max_shard_gib"].present and flag_values.format != "safetensors":
        raise UsageError("--max_shard_gib: an Orbax checkpoint has no shards of that kind")
    source, destination = positionals
    if not destination:
        raise UsageError("DST must be a folder, got ''")
    convert(
        source,
        Path(destination).expanduser(),
        format=flag_values.format,
        dtype=None if flag_values.dtype == "auto" else flag_values.dtype,
        max_shard_bytes=max(1, int(flag_values.max_shard_gib * _GIB)),
        report=say,
    )
    return 0
