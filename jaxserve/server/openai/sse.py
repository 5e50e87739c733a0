"""Server-sent events: one line of JSON each, the last one [DONE]. Used by `replies` and `endpoint`.

Invariant: an event is `data: `, JSON without any line break, and an empty line; it is built with one
encoding of what is new in it, everything else is made once per reply.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream"

_encoder = msgspec.json.Encoder()
# Legal in JSON, but some readers of lines take them for the end of one.
_LINE_BREAKS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


def encode(value: object) -> bytes:
    """JSON on one line, as UTF-8; no NaN."""
    data = _encoder.encode(value)
    for raw, escaped in _LINE_BREAKS:
        if raw in data:
            data = data.replace(raw, escaped)
    return data


def event(value: object) -> bytes:
    """One event."""
    return b"data: " + encode(value) + b"\n\n"


class ChunkWriter:
    """Events of one reply, which differ in their choices alone.

    Args:
        fields: what stands in every chunk.
        says_usage: every chunk has a usage: null, or what `chunk` is given.
    """

    def __init__(self, fields: Mapping[str, Any], *, says_usage: bool) -> None:
        self._head = b"data: " + encode(fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if says_usage else b"]}\n\n"

    def chunk(
        self, choice: object, usage: object = None, more: Mapping[str, Any] | None = None
    ) -> bytes:
        """An event with one choice.

        Args:
            choice: its object.
            usage: so far; None = what stands for none.
            more: fields beside the choices.
        """
        tail = self._tail if usage is None else self._usage_tail(usage)
        if more:
            tail = b"]," + encode(more)[1:-1] + tail[1:]
        return self._head + encode(choice) + tail

    def usage(self, usage: object) -> bytes:
        """The event of no choice that tells the usage."""
        return self._head + self._usage_tail(usage)

    def _usage_tail(self, usage: object) -> bytes:
        return b'],"usage":' + encode(usage) + b"}\n\n"
