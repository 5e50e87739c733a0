"""Recorded workloads: when requests arrived, how long their prompts were and how much was generated.

Read by `jaxserve simulate` and its tests; `synthetic.py` makes the same objects from distributions.
A trace never holds its prompts: 144 million tokens would not fit. `TraceRequest.prompt_token_ids`
makes one prompt when it is asked for.

Invariant: two prompts begin with the same n tokens exactly where their traces say so: with the same
blocks (mooncake), or nowhere (azure, generated workloads). Token ids are never negative, so that a
simulator may use the negative ones for what was generated.
"""

import csv
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import JaxserveError, shown

BLOCK_SIZE = 512  # tokens of a mooncake block
MAX_TRACE_TOKENS = 2**24  # of one prompt or output
MAX_BLOCKS = 2**31 // BLOCK_SIZE  # different blocks whose tokens have i32 ids
_AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_BLOCK_OFFSETS = np.arange(BLOCK_SIZE, dtype=np.int32)


class TraceError(JaxserveError):
    """A trace that cannot be read; names the file, the line, the field, its value and the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Args:
        index: its position in the trace, from 0.
        arrival_s: seconds after the first request.
        num_prompt_tokens: length of its prompt, at least 1.
        num_output_tokens: tokens generated, at least 1.
        blocks: i32[ceil(num_prompt_tokens / BLOCK_SIZE)], numbers of the prompt's blocks, equal where
            the trace's ids are; None when the prompt shares nothing with any other.
    """

    index: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: np.ndarray | None = None

    @property
    def num_padded_prompt_tokens(self) -> int:
        """Length of its prompt with the last block filled up."""
        blocks = self.blocks
        return self.num_prompt_tokens if blocks is None else len(blocks) * BLOCK_SIZE

    def prompt_token_ids(self, *, whole_blocks: bool = False) -> array:
        """Its prompt, made now.

        Token j of block b is b * BLOCK_SIZE + j, so equal blocks are equal tokens and nothing else
        is. The last block is cut to the prompt's length: ids that the trace repeats for a last
        block always come with the same length, so cutting loses no equality. A prompt without
        blocks repeats its index.

        Args:
            whole_blocks: fill the last block up, as a count of block ids sees it.

        Returns:
            i32[num_prompt_tokens], or a multiple of BLOCK_SIZE with `whole_blocks`.
        """
        if self.blocks is None:
            return array("i", [self.index]) * self.num_prompt_tokens
        ids = (self.blocks[:, None] * np.int32(BLOCK_SIZE) + _BLOCK_OFFSETS).reshape(-1)
        return array(
            "i", ids.tobytes() if whole_blocks else ids[: self.num_prompt_tokens].tobytes()
        )


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in order of arrival.

    Args:
        name: of the file or generator, for messages and reports.
        requests: at least one.
    """

    name: str
    requests: tuple[TraceRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(one.num_prompt_tokens for one in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(one.num_output_tokens for one in self.requests)

    @property
    def longest(self) -> int:
        """Prompt and output tokens of the longest request."""
        return max(one.num_prompt_tokens + one.num_output_tokens for one in self.requests)

    @property
    def has_blocks(self) -> bool:
        """Whether the trace says which prompts share blocks."""
        return self.requests[0].blocks is not None


@dataclass(frozen=True)
class _Line:
    """Where a value stands, for messages."""

    path: Path
    number: int

    def error(self, text: str) -> TraceError:
        return TraceError(f"{self.path}: line {self.number}: {text}")

    def integer(self, name: str, value: object, low: int, high: int = MAX_TRACE_TOKENS) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(f"{name} must be an integer in [{low}, {high}], got {shown(value)}")
        return value


def read_trace(path: str | Path, format: str, *, max_requests: int | None = None) -> Trace:
    """Reads a trace file.

    Args:
        path: the file.
        format: a key of TRACE_FORMATS.
        max_requests: stop after so many lines.

    Raises:
        TraceError: the file cannot be read, holds no request, or a line of it is at fault.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            requests = tuple(islice(_ordered(TRACE_FORMATS[format](path, file)), max_requests))
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text: {error.reason}") from None
    except ValueError as error:  # a zero byte in the name
        raise TraceError(f"cannot read {str(path)!r}: {error}") from None
    if not requests:
        raise TraceError(f"{path} holds no requests")
    return Trace(name=path.name, requests=requests)


def _ordered(requests: Iterable[tuple[_Line, TraceRequest]]) -> Iterator[TraceRequest]:
    last = -math.inf
    for line, request in requests:
        if request.arrival_s < last:
            raise line.error(
                "timestamp must not be before that of the request above it: it is "
                f"{request.arrival_s - last:+g} s"
            )
        last = request.arrival_s
        yield request


def _read_mooncake(path: Path, file: Iterable[str]) -> Iterator[tuple[_Line, TraceRequest]]:
    """JSON lines: timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens).

    Source: "Mooncake", Qin et al., FAST 2025; github.com/kvcache-ai/Mooncake, FAST25-release/traces.
    """
    numbers: dict[int, int] = {}  # hash id -> number of the block, dense
    first_ms: float | None = None
    index = 0
    for number, text in enumerate(file, start=1):
        line = _Line(path, number)
        if not text.strip():
            continue
        record = _json_object(line, text)
        timestamp_ms = _milliseconds(line, record.get("timestamp"))
        first_ms = timestamp_ms if first_ms is None else first_ms
        length = line.integer("input_length", record.get("input_length"), 1)
        yield (
            line,
            TraceRequest(
                index=index,
                arrival_s=(timestamp_ms - first_ms) / 1000,
                num_prompt_tokens=length,
                num_output_tokens=line.integer("output_length", record.get("output_length"), 1),
                blocks=_block_numbers(line, record.get("hash_ids"), length, numbers),
            ),
        )
        index += 1


def _json_object(line: _Line, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise line.error(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise line.error(f"must be a JSON object, got {shown(record)}")
    return record


def _milliseconds(line: _Line, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= 2**53):
        raise line.error(f"timestamp must be milliseconds in [0, 2**53], got {shown(value)}")
    return value


def _block_numbers(line: _Line, ids: object, length: int, numbers: dict[int, int]) -> np.ndarray:
    num_blocks = -(-length // BLOCK_SIZE)
    if not isinstance(ids, list) or len(ids) != num_blocks:
        raise line.error(
            f"hash_ids must be a list of {num_blocks} ids, one per {BLOCK_SIZE} tokens of "
            f"input_length {length}, got {shown(ids)}"
        )
    for one in ids:
        line.integer("hash_ids", one, -(2**63), 2**64 - 1)
    blocks = [numbers.setdefault(one, len(numbers)) for one in ids]
    if len(numbers) > MAX_BLOCKS:
        raise line.error(f"hash_ids: more than {MAX_BLOCKS} different blocks in the trace")
    return np.array(blocks, np.int32)


def _read_azure(path: Path, file: Iterable[str]) -> Iterator[tuple[_Line, TraceRequest]]:
    """CSV: TIMESTAMP, ContextTokens, GeneratedTokens; no prompt shares anything with another.

    Source: "Splitwise", Patel et al., ISCA 2024; github.com/Azure/AzurePublicDataset.
    """
    rows = csv.reader(file)
    header = _next_row(rows, _Line(path, 1))
    if header != _AZURE_HEADER:
        raise _Line(path, 1).error(f"must be {','.join(_AZURE_HEADER)}, got {shown(header)}")
    first: datetime | None = None
    index = 0
    while True:
        line = _Line(path, rows.line_num + 1)
        row = _next_row(rows, line)
        if row is None:
            return
        if not row:
            continue
        if len(row) != len(_AZURE_HEADER):
            raise line.error(f"must hold {len(_AZURE_HEADER)} fields, got {shown(row)}")
        at = _timestamp(line, row[0])
        first = at if first is None else first
        if (at.tzinfo is None) != (first.tzinfo is None):
            raise line.error(
                f"TIMESTAMP must be like the first, with or without zone, got {row[0]}"
            )
        yield (
            line,
            TraceRequest(
                index=index,
                arrival_s=(at - first).total_seconds(),
                num_prompt_tokens=_csv_integer(line, _AZURE_HEADER[1], row[1]),
                num_output_tokens=_csv_integer(line, _AZURE_HEADER[2], row[2]),
            ),
        )
        index += 1


def _next_row(rows: Iterator[list[str]], line: _Line) -> list[str] | None:
    try:
        return next(rows, None)
    except csv.Error as error:
        raise line.error(f"not CSV: {error}") from None


def _timestamp(line: _Line, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise line.error(
            f"TIMESTAMP must be a date and time like 2023-11-16 18:15:46.6805900, got {shown(text)}"
        ) from None


def _csv_integer(line: _Line, name: str, text: str) -> int:
    is_digits = text.isascii() and text.isdigit() and len(text) < 20
    return line.integer(name, int(text) if is_digits else text, 1)


# Name -> reader of the lines of an open file.
TRACE_FORMATS: dict[str, Callable[[Path, Iterable[str]], Iterator[tuple[_Line, TraceRequest]]]] = {
    "mooncake": _read_mooncake,
    "azure": _read_azure,
}
