"""Where `jaxserve run` puts its records: a JSON line per input line, in input order, as soon as order allows.

    OUTPUT                 lines 0 .. n-1, always without a gap: its line k is the record of input line k
    OUTPUT.partial.jsonl   finished lines that wait for a slower one before them; gone when none waits

Every record is written, whole, the moment it exists (to the one file or to the other), so a kill at any
point loses nothing that was finished and leaves at most one torn line, the last of a file. A kill may
leave records in the partial file that the output has by now; a stop leaves only those that wait. Memory
holds two integers per waiting record. When OUTPUT is no regular file (stdout, a pipe) the waiting records
stay in an unnamed temporary file.
"""

import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxserve.cli.output_files import partial_path, scratch_path
from jaxserve.cli.request_line import RequestLine
from jaxserve.cli.standard_streams import abandon, write_error
from jaxserve.echo import with_prompt
from jaxserve.errors import RequestError
from jaxserve.request import CompletionOutput, PromptLogprob, RequestOutput

_STDOUT = "stdout"
MAX_MESSAGE_LENGTH = 1000  # characters of an error record's message; a bad value may be megabytes
# Legal inside a JSON string, but many readers take them for the end of a line.
_LINE_BREAKS = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}

logger = logging.getLogger("jaxserve.cli")


class Prompt(NamedTuple):
    """A prompt that its outputs begin with."""

    token_ids: list[int]
    text: str


def success_record(
    line: RequestLine, output: RequestOutput, prompt: Prompt | None = None
) -> dict[str, object]:
    """The record of a finished line: its text and ids, or with n > 1 a list of outputs that hold
    these.

    Args:
        line: the line.
        output: what it gave, whole.
        prompt: where each output is to begin with it; it does not count as output.
    """
    several = line.params.n > 1
    echoed = output if prompt is None else with_prompt(output, prompt.token_ids, prompt.text)
    first = echoed.outputs[0]
    record: dict[str, object] = {
        "index": line.index,
        "id": line.id,
        **(
            {"outputs": [_choice(one) for one in echoed.outputs]}
            if several
            else _text_and_ids(first)
        ),
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "num_output_tokens": sum(len(one.token_ids) for one in output.outputs),
    }
    if not several:
        record |= _logprobs(first)
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [
            None
            if one is None
            else {"logprob": _number(one.logprob), "rank": one.rank, "top": _ranked(one.top)}
            for one in output.prompt_logprobs
        ]
    return record


def _choice(completion: CompletionOutput) -> dict[str, object]:
    return {"index": completion.index, **_text_and_ids(completion), **_logprobs(completion)}


def _text_and_ids(completion: CompletionOutput) -> dict[str, object]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        **({} if completion.stop_reason is None else {"stop_reason": completion.stop_reason}),
    }


def _logprobs(completion: CompletionOutput) -> dict[str, object]:
    found: dict[str, object] = {}
    if completion.logprobs is not None:
        found["logprobs"] = [_number(x) for x in completion.logprobs]
    if completion.top_logprobs is not None:
        found["top_logprobs"] = [_ranked(top) for top in completion.top_logprobs]
    return found


def _scored(one: PromptLogprob) -> dict[str, object]:
    return {"logprob": _number(one.logprob), "rank": one.rank, "top": _ranked(one.top)}


def _ranked(top: Iterable[tuple[int, float]]) -> list[list[object]]:
    return [[token_id, _number(logprob)] for token_id, logprob in top]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def error_record(line: RequestLine, error: RequestError) -> dict[str, object]:
    """The record of a line that has no result; its message begins with the line's number, from 1."""
    body = error.to_dict()
    body["message"] = f"line {line.index + 1}: {error.message}"[:MAX_MESSAGE_LENGTH]
    return {"index": line.index, "id": line.id, "error": body}


def encode_record(record: Mapping[str, object]) -> bytes:
    """One line of JSON: UTF-8, readable, no NaN, and only its end looks like the end of a line."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    for raw, escaped in _LINE_BREAKS.items():
        text = text.replace(raw, escaped)
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, perhaps from an id
        return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


class OrderedWriter(AbstractContextManager["OrderedWriter"]):
    """Puts records in input order.

    Args:
        output: where records go, unbuffered or flushed by us; at its end.
        partial: where records wait; readable and seekable.
        name: of the output, for messages; "stdout" is not closed at the end.
        partial_file: its path, to remove it at the end; None when it has no name.
        next_index: the first line whose record is not in `output`.
        waiting: index -> (offset, size in bytes) of the records already in `partial`.
    """

    def __init__(
        self,
        output: BinaryIO,
        partial: BinaryIO,
        *,
        name: str,
        partial_file: Path | None = None,
        next_index: int = 0,
        waiting: Mapping[int, tuple[int, int]] | None = None,
    ):
        self.next_index = next_index
        self._output = output
        self._partial = partial
        self._name = name
        self._partial_file = partial_file
        self._waiting = dict(waiting or {})
        self._drain()

    @classmethod
    def to_stream(cls, output: str) -> "OrderedWriter":
        """A writer to stdout ("-"), a pipe or a device.

        Raises:
            OutputError: it cannot be opened.
        """
        if output == "-":
            sys.stdout.flush()
            stream: BinaryIO = sys.stdout.buffer
            name = _STDOUT
        else:
            name = output
            try:
                stream = open(output, "wb", buffering=0)  # noqa: SIM115 - open as long as the writer is
            except OSError as error:
                raise write_error(output, error) from None
        return cls(stream, tempfile.TemporaryFile(buffering=0), name=name)  # type: ignore[arg-type]

    @classmethod
    def to_file(
        cls, output: Path, *, next_index: int, waiting: Mapping[int, tuple[int, int]]
    ) -> "OrderedWriter":
        """A writer that goes on behind what both files hold (see `resume.recover`).

        Raises:
            OutputError: a file cannot be opened.
        """
        path = partial_path(output)
        try:
            stream = open(output, "ab", buffering=0)  # noqa: SIM115 - as above
            partial = open(path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise write_error(error.filename, error) from None
        return cls(
            stream,
            partial,
            name=str(output),
            partial_file=path,
            next_index=next_index,
            waiting=waiting,
        )

    @property
    def num_waiting(self) -> int:
        """Records that are finished but not yet in the output."""
        return len(self._waiting)

    @property
    def num_done(self) -> int:
        """Records in either file."""
        return self.next_index + len(self._waiting)

    def has(self, index: int) -> bool:
        """Whether the line's record exists."""
        return index < self.next_index or index in self._waiting

    def put(self, index: int, record: Mapping[str, object]) -> None:
        """Takes the record of one line, once.

        Raises:
            OutputError: it cannot be written (the disk is full, nobody reads it any more, ...).
        """
        data = encode_record(record)
        if index == self.next_index:
            self._append(data)
            self._drain()
        else:
            offset = self._partial.seek(0, os.SEEK_END)
            self._write(self._partial, data, str(self._partial_file or "a temporary file"))
            self._waiting[index] = (offset, len(data))

    def _append(self, data: bytes) -> None:
        self._write(self._output, data, self._name)
        self.next_index += 1

    def _drain(self) -> None:
        """Moves what no longer waits, and empties the partial file when nothing does."""
        if self.next_index not in self._waiting:
            return
        while (place := self._waiting.pop(self.next_index, None)) is not None:
            offset, size = place
            self._partial.seek(offset)
            self._append(self._partial.read(size))
        if not self._waiting:
            self._partial.truncate(0)

    def _write(self, stream: BinaryIO, data: bytes, name: str) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[stream.write(view) :]
            stream.flush()
        except OSError as error:
            if stream is self._output and name == _STDOUT:
                abandon(sys.stdout)
            raise write_error(name, error) from None

    def close(self) -> None:
        """Closes the files; the partial file keeps only what still waits, and goes when nothing does."""
        if self._name != _STDOUT:
            self._output.close()
        if self._partial_file is not None:
            scratch = scratch_path(self._partial_file)
            if self._waiting:
                self._compact(self._partial_file, scratch)
            else:
                self._partial_file.unlink(missing_ok=True)
            scratch.unlink(missing_ok=True)  # this one's, or one that a kill left
        self._partial.close()

    def _compact(self, path: Path, scratch: Path) -> None:
        """Puts a file of the waiting records alone in the place of the one that holds more."""
        try:
            with open(scratch, "wb") as stream:
                for _, (offset, size) in sorted(self._waiting.items()):
                    self._partial.seek(offset)
                    stream.write(self._partial.read(size))
            os.replace(scratch, path)
        except OSError as error:  # a full disk, perhaps: the old file holds all of it too
            logger.debug("%s keeps records that the output has: %s", path, error)

    def __exit__(self, *exc: object) -> None:
        self.close()
