"""Where `jaxserve run` gets its lines from: a file, a pipe, or the prompts of the command line, as raw bytes.

Only a newline byte ends a line (U+2028 inside one survives), a carriage return before it and a byte
order mark at the start are dropped, and nothing behind the last newline is no line. Read lazily: memory
holds one line at a time, and no line may be longer than `MAX_LINE_BYTES`. What a line means is
`request_line.py`'s business.
"""

import codecs
import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.standard_streams import is_stdin_closed

MAX_LINE_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20
_PIPE_WAIT_S = 0.1  # how long an idle run waits before it looks again whether it was asked to stop
_QUEUE_LINES = 16
_STDIN = 0


def split_lines(read_chunk: Callable[[], bytes]) -> Iterator[bytes]:
    """Yields lines without their endings.

    Args:
        read_chunk: returns the next bytes, b"" at the end.

    Yields:
        One line; one that is longer than MAX_LINE_BYTES comes cut to MAX_LINE_BYTES + 1.
    """
    line = bytearray()
    is_first = True

    def take() -> bytes:
        nonlocal is_first
        data = bytes(line.removesuffix(b"\r"))
        line.clear()
        if is_first:
            data = data.removeprefix(codecs.BOM_UTF8)
            is_first = False
        return data

    while chunk := read_chunk():
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            line += chunk[start:end]
            start = end + 1
            del line[MAX_LINE_BYTES + 1 :]
            yield take()
        line += chunk[start:]
        del line[MAX_LINE_BYTES + 1 :]
    if line:
        yield take()


class LineSource(Protocol):
    """Lines one at a time, without ever keeping a busy engine waiting."""

    exhausted: bool

    def next_line(self, wait: bool) -> bytes | None:
        """The next line; None at the end, or when a pipe has none yet, after a short wait if asked to."""
        ...


class ReadyLines:
    """Lines that need no waiting: of a regular file, or prompts."""

    def __init__(self, lines: Iterator[bytes]):
        self.exhausted = False
        self._lines = lines

    def next_line(self, wait: bool) -> bytes | None:
        line = next(self._lines, None)
        self.exhausted = line is None
        return line


class PipedLines:
    """Lines of a pipe, read by a thread, so that a slow writer does not hold up what is running."""

    def __init__(self, stream: BinaryIO, name: str = "the input"):
        self.exhausted = False
        self._name = name
        self._queue: queue.Queue[bytes | OSError | None] = queue.Queue(maxsize=_QUEUE_LINES)
        # A daemon: nobody can wake a read of a pipe that never closes, yet the process must end.
        threading.Thread(target=self._read, args=(stream,), daemon=True, name="input").start()

    def _read(self, stream: BinaryIO) -> None:
        try:
            with stream:
                for line in split_lines(lambda: stream.read(_CHUNK_BYTES)):
                    self._queue.put(line)
        except OSError as error:
            self._queue.put(error)
        self._queue.put(None)

    def next_line(self, wait: bool) -> bytes | None:
        try:
            line = self._queue.get(block=wait, timeout=_PIPE_WAIT_S if wait else None)
        except queue.Empty:
            return None
        if isinstance(line, OSError):
            raise UsageError(f"cannot read {self._name}: {line.strerror}")
        self.exhausted = line is None
        return line


@dataclass(frozen=True, kw_only=True)
class RunInput:
    """The lines of a run and what is known of them beforehand.

    Args:
        lines: the lines, to be read once.
        num_lines: how many, or None for a pipe.
        sha256: of the content, hex, or None for a pipe.
        first: the first line that is not blank; None for a pipe, or where there is none.
    """

    lines: LineSource
    num_lines: int | None
    sha256: str | None
    first: bytes | None = None


def open_prompts(prompts: Sequence[str]) -> RunInput:
    """Prompts of the command line as lines; what was no UTF-8 there is none here."""
    lines = [prompt.encode("utf-8", "surrogateescape") for prompt in prompts]
    digest = hashlib.sha256(b"".join(b"%d:%b" % (len(line), line) for line in lines))
    return RunInput(lines=ReadyLines(iter(lines)), num_lines=len(lines), sha256=digest.hexdigest())


def open_input(name: str, *, flag: str = "--input") -> RunInput:
    """Opens a file, or stdin for "-". A regular file is read once beforehand, for its hash and length.

    Args:
        name: a path, or "-".
        flag: that named it, for messages.

    Raises:
        UsageError: it cannot be read.
    """
    shown = f"{flag}={name}"
    if name == "-":
        if is_stdin_closed():
            raise UsageError(f"cannot read {shown}: stdin is closed")
        # Unbuffered: a thread that waits inside sys.stdin's buffer would keep the interpreter from ending.
        return _piped(open(_STDIN, "rb", buffering=0, closefd=False), shown)
    path = Path(name)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            return _piped(open(path, "rb", buffering=0), shown)
        sha256, num_lines = _survey(path)
    except OSError as error:
        raise UsageError(f"cannot read {shown}: {error.strerror}") from None
    return RunInput(
        lines=ReadyLines(_file_lines(path)),
        num_lines=num_lines,
        sha256=sha256,
        first=next((line for line in _file_lines(path) if line.strip()), None),
    )


def _piped(stream: BinaryIO, shown: str) -> RunInput:
    return RunInput(lines=PipedLines(stream, shown), num_lines=None, sha256=None)


def _file_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        yield from split_lines(lambda: stream.read(_CHUNK_BYTES))


def _survey(path: Path) -> tuple[str, int]:
    """sha256 and number of lines of a file, in one pass."""
    digest = hashlib.sha256()
    num_newlines, last = 0, b"\n"
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_newlines += chunk.count(b"\n")
            last = chunk[-1:]
    return digest.hexdigest(), num_newlines + (last != b"\n")
