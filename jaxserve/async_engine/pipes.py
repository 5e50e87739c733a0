"""The line between two processes: a pair of sockets, length-prefixed messages. Both ends stand here.

    frame = length (4 bytes, little endian) + message (see `messages`)

`SocketLine` is the engine's end: it never waits for the client. What the client is too slow to read is
kept, the parts of each request merged, until there is room. `ClientLine` is the client's end, in its
event loop; what it sends waits there while the engine is busy, and `wait_for_room` holds back who would
send more.

Invariant: what is kept on either side is bounded: by what the requests in flight can produce, and by
MAX_UNSENT_BYTES and one message.
"""

import asyncio
import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import cast

from jaxserve.async_engine.commands import Command, Event, Refused, Released
from jaxserve.async_engine.engine_loop import ClientGone
from jaxserve.async_engine.messages import Message, Settings, decode, encode
from jaxserve.errors import InvalidRequestError
from jaxserve.request import RequestOutput, merge_outputs

MAX_FRAME_BYTES = 2**30
MAX_UNSENT_BYTES = 2**20
_READ_BYTES = 2**18
_LENGTH = struct.Struct("<I")


class FrameError(Exception):
    """What came is no frame."""


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytearray]:
        """Takes what came; the messages that are complete now."""
        self._bytes += data
        found = []
        begin = 0
        while len(self._bytes) - begin >= _LENGTH.size:
            length = _LENGTH.unpack_from(self._bytes, begin)[0]
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a message has {MAX_FRAME_BYTES} bytes or fewer, got {length}")
            end = begin + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            found.append(self._bytes[begin + _LENGTH.size : end])
            begin = end
        if begin:
            del self._bytes[:begin]
        return found


def frame(message: Message) -> bytes:
    """A message as it is sent.

    Raises:
        InvalidRequestError: a request that cannot be sent.
    """
    data = encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise InvalidRequestError(
            f"a request must have {MAX_FRAME_BYTES} bytes or fewer as a message, got {len(data)}"
        )
    return _LENGTH.pack(len(data)) + data


class SocketLine:
    """The engine's end; meets `engine_loop.Line`.

    Args:
        connection: to the client; of this line alone from now on.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._socket = connection
        self._frames = Frames()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._poll.register(connection, select.POLLIN)
        self._unsent = bytearray()
        self._late: dict[str, list[RequestOutput]] = {}  # released while there was no room
        self._later: list[Event] = []  # what comes after it

    def receive_settings(self) -> Settings:
        """The first message.

        Raises:
            ClientGone: it did not come.
        """
        while not (messages := list(self._read())):
            self._wait(None)
        settings = messages[0]
        if len(messages) > 1 or not isinstance(settings, Settings):
            raise FrameError("the first message is Settings, and the next comes after the start")
        return settings

    def receive(self, timeout_s: float | None) -> list[Command]:
        """See `Line`."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._flush()
            commands = list(self._read())
            if commands or timeout_s == 0.0:
                return commands  # type: ignore[return-value] - a client sends nothing else
            if self._wait(end_s) or (end_s is not None and time.monotonic() >= end_s):
                return list(self._read())  # type: ignore[return-value]

    def _wait(self, end_s: float | None) -> bool:
        """Until something can be read or sent; whether somebody called `wake`."""
        events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        self._poll.modify(self._socket, events)
        wait_ms = None if end_s is None else max(0.0, end_s - time.monotonic()) * 1000
        ready = dict(self._poll.poll(wait_ms))
        if self._wake_read not in ready:
            return False
        os.read(self._wake_read, 4096)
        return True

    def _read(self) -> Iterator[Message]:
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise ClientGone from error
            if not data:
                raise ClientGone
            for message in map(decode, self._frames.feed(data)):
                if isinstance(message, Refused):
                    self.send(message)
                else:
                    yield message

    def send(self, event: Event) -> None:
        """See `Line`. Once the client has gone it does nothing."""
        if not self._unsent and not self._late:
            self._unsent += frame(event)
        elif isinstance(event, Released):
            for output in event.outputs:
                self._late.setdefault(output.request_id, []).append(output)
        else:
            self._later.append(event)
        self._flush()

    def _flush(self) -> None:
        """Sends what there is room for."""
        while self._unsent or self._late or self._later:
            if not self._unsent:
                self._frame_late()
            try:
                num_sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:  # the next `receive` says so
                self._unsent.clear()
                self._late.clear()
                self._later.clear()
                return
            del self._unsent[:num_sent]

    def _frame_late(self) -> None:
        if self._late:
            self._unsent += frame(Released([_merge(parts) for parts in self._late.values()]))
            self._late.clear()
        later, self._later = self._later, []
        for event in later:
            self._unsent += frame(event)

    def wake(self) -> None:
        """See `Line`."""
        with contextlib.suppress(BlockingIOError):  # full: it is awake
            os.write(self._wake_write, b"w")

    def finish(self, timeout_s: float) -> None:
        """Sends what is left, for so long at most, and closes."""
        end_s = time.monotonic() + timeout_s
        self._flush()
        while self._unsent and time.monotonic() < end_s:
            self._wait(end_s)
            self._flush()
        self._socket.close()


def _merge(parts: list[RequestOutput]) -> RequestOutput:
    told = next((p.prompt_logprobs for p in parts if p.prompt_logprobs is not None), None)
    whole = merge_outputs(parts)
    whole.prompt_logprobs = told
    return whole


class ClientLine(asyncio.Protocol):
    """The client's end.

    Args:
        take: called with each event, in order.
        lost: called once, when the engine's end is closed or sends nonsense; says what was wrong, or None.
    """

    def __init__(self, take: Callable[[Message], None], lost: Callable[[str | None], None]):
        self._take = take
        self._lost = lost
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._fault: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass of it
        self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._take(decode(message))
        except Exception as error:  # noqa: BLE001 - whatever it is, this line is of no use any more
            self._fault = f"{type(error).__name__}: {error}"
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.set()
        self._lost(self._fault)

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    async def wait_for_room(self) -> None:
        """Returns when there is little left to send, or nobody to send it to."""
        await self._room.wait()

    def send(self, message: Settings | Command) -> None:
        """Sends; does nothing once the line is lost.

        Raises:
            InvalidRequestError: a request that cannot be sent.
        """
        data = frame(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Closes; `lost` is called."""
        if self._transport is not None:
            self._transport.abort()
