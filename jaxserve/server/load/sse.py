"""Server-sent events out of bytes, cut anywhere.

Used by `client.py`. Only the `data` field is of interest: comments and other fields are passed over.
Source: the event stream format of the HTML standard.
"""

from collections.abc import Iterator

MAX_EVENT_BYTES = 2**24


class EventError(ValueError):
    """An event that has no end."""


class EventParser:
    """Takes the parts of a body and gives the events that are whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, part: bytes) -> list[bytes]:
        """The data of each event that ended in this part.

        Raises:
            EventError: an event is longer than MAX_EVENT_BYTES.
        """
        data = self._rest + part
        if b"\r" in data:
            # A "\r" at the very end may be the first half of "\r\n": it waits for the next part.
            held = b"\r" if data.endswith(b"\r") else b""
            data = data.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *blocks, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return [found for block in blocks if (found := _data(block)) is not None]


def _data(block: bytes) -> bytes | None:
    """The data of one event; None where it has none."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = list(_data_lines(block))
    return b"\n".join(lines) if lines else None


def _data_lines(block: bytes) -> Iterator[bytes]:
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            yield value.removeprefix(b" ")
