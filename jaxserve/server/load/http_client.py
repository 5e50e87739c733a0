"""A small HTTP/1.1 client on asyncio streams, fast enough not to be what is measured.

Used by `client.py` and `scripts/gates`. Why not httpx: reading 200 streams of 50 events a second each on
two cores took 107 us of CPU time an event with httpx and 31 us here, so that httpx alone fills a core and
falls behind (a run of 4.0 s took 5.2 s). Invariant: a connection is used again only after the whole of a
response was read from it; it is closed in every other case, which tells the server that its reader left.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from jaxserve.errors import JaxserveError

_MAX_HEAD_BYTES = 64 * 2**10
_READ_BYTES = 64 * 2**10
_MAX_CHUNK_LINE_BYTES = 4096
_DEFAULT_PORTS = {"http": 80, "https": 443}


class HttpError(JaxserveError):
    """No answer, or one that is no HTTP.

    Args:
        kind: a short name to count it by: "refused", "cut" or "malformed".
        message: what happened.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server is.

    Args:
        scheme: "http" or "https".
        host: its name or number.
        port: its port.
        path: what stands before every route: "" or "/prefix".
    """

    scheme: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Reads a base URL; a "/v1" at its end is dropped, since routes bring it along.

        Raises:
            ValueError: it is none.
        """
        parts = urlsplit(url)
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.query:
            raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
        port = parts.port or _DEFAULT_PORTS[parts.scheme]  # a port that is none raises ValueError
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(scheme=parts.scheme, host=parts.hostname, port=port, path=path)

    @property
    def host_header(self) -> str:
        """As the header "host" has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


class BodyDecoder:
    """The body of a response out of the bytes behind its head.

    Args:
        headers: of the response, names in lower case.
        has_body: False for what never has one.
    """

    def __init__(self, headers: Mapping[str, str], *, has_body: bool = True):
        self.done = not has_body
        self._buffer = bytearray()
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        self._left: int | None = None
        if not self._is_chunked and length is not None:
            if not length.isdecimal():
                raise HttpError("malformed", f"content-length is {length[:40]!r}")
            self._left = int(length)
            self.done = self.done or self._left == 0
        self.ends_with_connection = not self._is_chunked and self._left is None

    def feed(self, data: bytes) -> bytes:
        """The part of the body that these bytes hold."""
        if self.done:
            return b""
        if not self._is_chunked:
            if self._left is None:
                return data
            taken = data[: self._left]
            self._left -= len(taken)
            self.done = self._left == 0
            return taken
        self._buffer += data
        return b"".join(self._chunks())

    def _chunks(self):
        buffer = self._buffer
        while not self.done:
            end = buffer.find(b"\r\n")
            if end < 0:
                if len(buffer) > _MAX_CHUNK_LINE_BYTES:
                    raise HttpError("malformed", "a chunk's size line has no end")
                return
            size = _chunk_size(bytes(buffer[:end]))
            if size == 0:
                self._skip_trailers(end)
                return
            stop = end + 2 + size
            if len(buffer) < stop + 2:
                return
            if buffer[stop : stop + 2] != b"\r\n":
                raise HttpError("malformed", "a chunk is longer than its size says")
            yield bytes(buffer[end + 2 : stop])
            del buffer[: stop + 2]

    def _skip_trailers(self, end: int) -> None:
        """Ends the body where its trailers do, if that has arrived: `end` is that of the last size line."""
        if self._buffer[end : end + 4] == b"\r\n\r\n" or b"\r\n\r\n" in self._buffer[end:]:
            self.done = True


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        return int(digits, 16) if digits.isalnum() else int("", 16)
    except ValueError:
        raise HttpError("malformed", f"a chunk's size is {digits[:40]!r}") from None


class _Connection:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer
        self.was_used = False

    def close(self) -> None:
        self.writer.close()


class Response:
    """A response whose head was read; its body is read by `parts` or `read`, once."""

    def __init__(
        self, status: int, headers: Mapping[str, str], connection: _Connection, decoder: BodyDecoder
    ):
        self.status = status
        self.headers = headers
        self._connection = connection
        self._decoder = decoder

    @property
    def is_whole(self) -> bool:
        """Whether the body was read to its end."""
        return self._decoder.done

    async def parts(self) -> AsyncIterator[bytes]:
        """The body, as it arrives.

        Raises:
            HttpError: the connection ended before the body did.
        """
        decoder, reader = self._decoder, self._connection.reader
        while not decoder.done:
            try:
                data = await reader.read(_READ_BYTES)
            except OSError as error:
                raise HttpError("cut", f"the connection broke: {error}") from None
            if not data:
                if not decoder.ends_with_connection:
                    raise HttpError("cut", "the server closed the connection within the body")
                decoder.done = True
                return
            if part := decoder.feed(data):
                yield part

    async def read(self, limit: int = 2**24) -> bytes:
        """The whole body; what is beyond `limit` bytes is an error."""
        body = bytearray()
        async for part in self.parts():
            body += part
            if len(body) > limit:
                raise HttpError("malformed", f"the body is longer than {limit} bytes")
        return bytes(body)


class HttpClient:
    """Sends requests to one server, over as many connections as there are requests under way.

    Nothing here is bounded in time: put `asyncio.timeout` around what should be.

    Args:
        address: where it is.
        headers: sent with every request.
        keep_alive: whether a connection is used again for a later request.
    """

    def __init__(
        self,
        address: Address,
        *,
        headers: Mapping[str, str] | None = None,
        keep_alive: bool = True,
    ):
        self.address = address
        self._headers = dict(headers or {})
        self._keep_alive = keep_alive
        self._idle: list[_Connection] = []

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Response]:
        """Sends a request; gives its response, and leaves by closing the connection if the body was
        not read to its end.

        Args:
            method: of HTTP.
            path: begins with "/".
            body: JSON unless `headers` says something else.
            headers: besides those of every request.

        Raises:
            HttpError: no response came.
        """
        data = self._message(method, path, body, headers or {})
        connection, response = await self._exchange(method, data)
        try:
            yield response
        finally:
            keeps = response.headers.get("connection", "").lower() != "close"
            is_over = response.is_whole and not response._decoder.ends_with_connection
            if self._keep_alive and keeps and is_over:
                connection.was_used = True
                self._idle.append(connection)
            else:
                connection.close()

    async def _exchange(self, method: str, data: bytes) -> tuple[_Connection, Response]:
        """Sends on an idle connection, or on a new one; a server may have closed the idle one meanwhile."""
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                return connection, await self._send(connection, method, data)
            except HttpError as error:
                connection.close()
                if not (connection.was_used and error.kind == "unanswered"):
                    raise
            except BaseException:
                connection.close()
                raise

    async def _connect(self) -> _Connection:
        address = self.address
        context = ssl.create_default_context() if address.scheme == "https" else None
        try:
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=context, limit=_MAX_HEAD_BYTES
            )
        except OSError as error:
            where = f"{address.scheme}://{address.host_header}"
            raise HttpError("refused", f"cannot connect to {where}: {error}") from None
        return _Connection(reader, writer)

    async def _send(self, connection: _Connection, method: str, data: bytes) -> Response:
        reader = connection.reader
        try:
            connection.writer.write(data)
            await connection.writer.drain()
        except OSError:
            pass  # it may have answered before it closed: a body that is too long, for example
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                status, headers = parse_head(head)
                if status >= 200:
                    break
        except asyncio.IncompleteReadError as error:
            kind = "cut" if error.partial else "unanswered"
            raise HttpError(kind, "the server closed the connection without an answer") from None
        except asyncio.LimitOverrunError:
            raise HttpError("malformed", "the head of the answer has no end") from None
        except OSError as error:
            raise HttpError("unanswered", f"the connection broke: {error}") from None
        has_body = method != "HEAD" and status not in (204, 304)
        return Response(status, headers, connection, BodyDecoder(headers, has_body=has_body))

    def _message(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> bytes:
        fields = {"host": self.address.host_header, "accept": "*/*"} | self._headers
        if body is not None:
            fields |= {"content-type": "application/json", "content-length": str(len(body))}
        if not self._keep_alive:
            fields["connection"] = "close"
        fields |= {name.lower(): value for name, value in headers.items()}
        lines = [f"{method} {self.address.path}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b"")

    async def close(self) -> None:
        """Closes idle connections."""
        for connection in self._idle:
            connection.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await connection.writer.wait_closed()
        self._idle.clear()


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """(status, headers with names in lower case) of a response's head.

    Raises:
        HttpError: it is none.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not status.isdecimal():
        raise HttpError("malformed", f"the answer begins with {first[:60]!r}, which is no HTTP/1")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return int(status), headers
