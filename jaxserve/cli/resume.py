"""What makes `--resume` safe: who made an output, and how much of it is there.

    OUTPUT.meta.json   the identity of the run: input, model, sampling flags and seed; written first

`run` calls `check_identity` and `recover` before it writes. Invariant: no finished record is thrown
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
from jaxserve.cli.run_output import OutputError, partial_path

FORMAT = 1
_WAY_OUT = "give --overwrite, or another --output"
_MODEL_SUFFIXES = (".json", ".jinja", ".safetensors", ".gguf")
_SAMPLE_BYTES = 2**14
_NUM_SAMPLES = 64


def meta_path(output: Path) -> Path:
    """Where the identity of the run that made an output is kept."""
    return output.with_name(output.name + ".meta.json")


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
    files = [model] if model.is_file() else sorted(model.iterdir())
    digest = hashlib.sha256()
    for path in files:
        if path.suffix not in _MODEL_SUFFIXES or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as stream:
            for offset in _sample_offsets(size):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


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
    scratch = path.with_name(path.name + ".tmp")
    try:
        scratch.write_text(json.dumps({"format": FORMAT, **identity}, indent=2) + "\n", "utf-8")
        os.replace(scratch, path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None


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
    path = meta_path(output)
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        raise UsageError(
            f"cannot resume {output}: {path.name} beside it, which tells how it was made, cannot be read;"
            f" {_WAY_OUT}"
        ) from None
    wanted = {"format": FORMAT, **identity}
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(
            f"cannot resume {output}: {path.name} was not written by this version; {_WAY_OUT}"
        )
    differences = list(_differences(found, wanted, input_name))
    if differences:
        raise UsageError(f"cannot resume {output}: {', '.join(differences)}; {_WAY_OUT}")


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
    """

    next_index: int = 0
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_failed: int = 0

    @property
    def num_done(self) -> int:
        """Lines that need no more work."""
        return self.next_index + len(self.waiting)


def recover(output: Path) -> Recovered:
    """Reads what is finished and cuts off a torn last line, from the output and from the partial file.

    Raises:
        UsageError: the output holds something that this run cannot have written.
    """
    next_index, num_failed, end = 0, 0, 0
    for offset, size, record in _records(output):
        if record is None:
            end_of_file = output.stat().st_size
            if offset + size < end_of_file:
                raise UsageError(
                    f"cannot resume {output}: its line {next_index + 1} is no record; {_WAY_OUT}"
                )
            break
        if record["index"] != next_index:
            raise UsageError(
                f"cannot resume {output}: its line {next_index + 1} holds index {record['index']};"
                f" {_WAY_OUT}"
            )
        next_index, end = next_index + 1, offset + size
        num_failed += "error" in record
    _cut(output, end)

    waiting: dict[int, tuple[int, int]] = {}
    partial, end = partial_path(output), 0
    for offset, size, record in _records(partial):
        if record is None:
            break
        end = offset + size
        if record["index"] >= next_index and record["index"] not in waiting:
            waiting[record["index"]] = (offset, size)
            num_failed += "error" in record
    _cut(partial, end)
    return Recovered(next_index=next_index, waiting=waiting, num_failed=num_failed)


def _records(path: Path) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
    """(offset, size in bytes, record) of each line of a file; the record is None where the line is none."""
    if not path.is_file():
        return
    offset = 0
    with open(path, "rb") as stream:
        for data in stream:
            yield offset, len(data), _record(data)
            offset += len(data)


def _record(data: bytes) -> dict[str, Any] | None:
    if not data.endswith(b"\n"):
        return None
    try:
        record = json.loads(data)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("index")) is int else None


def _cut(path: Path, size: int) -> None:
    """Shortens a file to its whole records."""
    if path.is_file() and path.stat().st_size > size:
        os.truncate(path, size)
