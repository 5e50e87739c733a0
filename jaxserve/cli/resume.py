"""What makes `--resume` safe: who made an output, and how much of it is there.

    OUTPUT.meta.json   the identity of the run: input, model, sampling flags and seed, and what the engine
                       could serve; written first

`run` calls `check_identity` and `recover` before the model is loaded, `check_served` behind that, and only
then `cut_torn`, the first that changes a file. Invariant: no finished record is thrown
away unless the user said --overwrite, and no output ever mixes records of two different runs.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.output_files import meta_path, partial_path, scratch_path
from jaxserve.cli.standard_streams import write_error
from jaxserve.stats import EngineStats
from jaxserve.weights.orbax_files import config_directory, orbax_item

FORMAT = 4
_WAY_OUT = "give --overwrite, or another --output"
_MODEL_SUFFIXES = (".json", ".jinja", ".safetensors", ".gguf")
_SAMPLE_BYTES = 2**14
_NUM_SAMPLES = 64
_SERVED_FLAGS = {
    "max_request_tokens": "--max_model_len, --num_pages or --kv_cache_gib",
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv_cache_dtype",
}
_RECORD_START = b'{"index": '


def model_fingerprint(model: Path) -> str:
    """A hash of a checkpoint: its files' names, sizes and contents.

    Of a large file 64 evenly spread samples of 16 KiB are read, the first and the last bytes among
    them: enough to tell two trainings of one model apart, and quick for files of any size. A copied
    checkpoint keeps its hash.

    Args:
        model: a checkpoint directory or file.

    Returns:
        sha256, hex.
    """
    digest = hashlib.sha256()
    for path in _files_of(model):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as stream:
            for offset in _sample_offsets(size):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _files_of(model: Path) -> list[Path]:
    if model.is_file():
        return [model]
    item = orbax_item(model)
    folder = model if item is None else config_directory(item)
    files = [path for path in folder.iterdir() if path.suffix in _MODEL_SUFFIXES]
    arrays = [] if item is None else item.rglob("*")  # whatever they are called
    return sorted(path for path in {*files, *arrays} if path.is_file())


def _sample_offsets(size: int) -> list[int]:
    if size <= _NUM_SAMPLES * _SAMPLE_BYTES:
        return list(range(0, size, _SAMPLE_BYTES))
    last = size - _SAMPLE_BYTES
    return [last * i // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES)]


def write_identity(output: Path, identity: Mapping[str, Any]) -> None:
    """Writes the identity beside the output, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    path = meta_path(output)
    scratch = scratch_path(path)
    try:
        scratch.write_text(json.dumps({"format": FORMAT, **identity}, indent=2) + "\n", "utf-8")
        os.replace(scratch, path)
    except OSError as error:
        raise write_error(str(path), error) from None


def has_records(output: Path) -> bool:
    """Whether anything finished lies in the output or waits beside it."""
    return any(
        path.is_file() and path.stat().st_size > 0 for path in (output, partial_path(output))
    )


def check_identity(
    output: Path, identity: Mapping[str, Any], *, input_name: str = "the input file has"
) -> None:
    """Refuses to continue an output that another run made.

    Args:
        output: the output.
        identity: of this run.
        input_name: the input and its verb, for the message.

    Raises:
        UsageError: names what differs, with both values, and what can be done.
    """
    found = _read_identity(output)
    differences = list(_differences(found, identity, input_name))
    if differences:
        raise UsageError(f"cannot resume {output}: {', '.join(differences)}; {_WAY_OUT}")


def served_by(stats: EngineStats) -> dict[str, Any]:
    """What of a loaded engine decides what an output holds, beyond the flags: a part of the identity.

    A request is clamped or refused by the smaller of the context and the page pool, and "auto" is
    another dtype on another device. Pages of another type give other tokens.
    """
    num_slots = stats.num_slots
    return {
        "max_request_tokens": min(stats.max_model_len, num_slots),
        "dtype": stats.dtype,
        "kv_cache_dtype": stats.kv_cache_dtype,
    }


def check_served(output: Path, served: Mapping[str, Any]) -> None:
    """Refuses to continue an output on an engine that would answer otherwise.

    Args:
        output: the output; `check_identity` has let it pass.
        served: by `served_by`.

    Raises:
        UsageError: names what differs, with both values and the flags to set.
    """
    found = _read_identity(output).get("served")
    before = found if isinstance(found, dict) else {}
    differences = [
        f"{name}: {before.get(name)!r} then, {value!r} now; set {_SERVED_FLAGS[name]}"
        for name, value in served.items()
        if before.get(name) != value
    ]
    if differences:
        raise UsageError(
            f"cannot resume {output}: it was made by another engine ({', '.join(differences)}), or "
            f"{_WAY_OUT}"
        )


def _read_identity(output: Path) -> dict[str, Any]:
    path = meta_path(output)
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        raise UsageError(
            f"cannot resume {output}: {path.name} beside it, which tells how it was made, cannot be read;"
            f" {_WAY_OUT}"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(
            f"cannot resume {output}: {path.name} was not written by this version; {_WAY_OUT}"
        )
    return found


def _differences(
    found: Mapping[str, Any], wanted: Mapping[str, Any], input_name: str
) -> Iterator[str]:
    """Clauses for what differs: contents that have changed, settings that were others."""
    for name, value in wanted.items():
        old = found.get(name)
        if old == value:
            continue
        old, value = (one if isinstance(one, dict) else {} for one in (old, value))
        changed = [key for key in value if old.get(key) != value[key]]
        if "sha256" in changed:
            changed.remove("sha256")
            yield f"{input_name if name == 'input' else f'the {name} has'} changed"
        if changed:
            values = (f"{key}: {old.get(key)!r} then, {value[key]!r} now" for key in changed)
            yield f"it was made with another {name} ({', '.join(values)})"


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What an earlier run left.

    Args:
        next_index: lines whose record is in the output.
        waiting: index -> (offset, size in bytes) of records in the partial file.
        num_failed: how many of all these are error records.
        sizes: of each file that ends in a torn line, the bytes before that line.
    """

    next_index: int = 0
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_failed: int = 0
    sizes: dict[Path, int] = field(default_factory=dict)

    @property
    def num_done(self) -> int:
        """Lines that need no more work."""
        return self.next_index + len(self.waiting)


def recover(output: Path, num_lines: int) -> Recovered:
    """Reads what is finished, in the output and in the partial file; changes neither.

    A last line without its newline that begins like a record is one that a kill has torn, to be done
    again. Anything else that is no record was not written by a run and is not thrown away.

    Args:
        output: the output.
        num_lines: of the input.

    Raises:
        UsageError: a file holds something that this run cannot have written.
    """
    next_index, num_failed = 0, 0
    waiting: dict[int, tuple[int, int]] = {}
    sizes: dict[Path, int] = {}
    for _, _, record in _records(output, output, num_lines, sizes):
        if record["index"] != next_index:
            raise UsageError(
                f"cannot resume {output}: its line {next_index + 1} holds index {record['index']};"
                f" {_WAY_OUT}"
            )
        next_index += 1
        num_failed += record.get("error") is not None
    for offset, size, record in _records(output, partial_path(output), num_lines, sizes):
        if record["index"] >= next_index and record["index"] not in waiting:
            waiting[record["index"]] = (offset, size)
            num_failed += record.get("error") is not None
    return Recovered(next_index=next_index, waiting=waiting, num_failed=num_failed, sizes=sizes)


def cut_torn(recovered: Recovered) -> None:
    """Cuts torn last lines off, so that records can be appended.

    Raises:
        OutputError: a file cannot be written.
    """
    for path, size in recovered.sizes.items():
        try:
            os.truncate(path, size)
        except OSError as error:
            raise write_error(str(path), error) from None


def _records(
    output: Path, path: Path, num_lines: int, sizes: dict[Path, int]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(offset, size in bytes, record) of each line of a file; a torn last line goes to `sizes`."""
    if not path.is_file():
        return
    which = "its" if path == output else f"of {path.name} beside it,"
    offset = 0
    with open(path, "rb") as stream:
        for number, data in enumerate(stream, start=1):
            if not data.endswith(b"\n") and _is_torn_record(data):
                sizes[path] = offset
                return
            record = _record(data)
            if record is None:
                raise UsageError(
                    f"cannot resume {output}: {which} line {number} is no record; {_WAY_OUT}"
                )
            if not 0 <= record["index"] < num_lines:
                raise UsageError(
                    f"cannot resume {output}: {which} line {number} holds index {record['index']}, "
                    f"the input has {num_lines} lines; {_WAY_OUT}"
                )
            yield offset, len(data), record
            offset += len(data)


def _is_torn_record(data: bytes) -> bool:
    """Whether a line without its newline is the beginning of a record, or space that was never filled."""
    written = data.rstrip(b"\0")  # a power cut may leave a file longer than what reached the disk
    return written.startswith(_RECORD_START) or _RECORD_START.startswith(written)


def _record(data: bytes) -> dict[str, Any] | None:
    if not data.endswith(b"\n"):
        return None
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("index")) is int else None
