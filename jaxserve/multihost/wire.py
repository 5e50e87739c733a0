"""`Wire`: messages between two processes over TCP, each side sure of the other. Stdlib and numpy.

    message = kind, fields (JSON) and arrays      frame = magic, lengths | header JSON | the arrays' bytes

Nothing that comes is run and no name of a type is looked up: a header is JSON, an array is one of DTYPES.
Both sides prove that they have the secret of this run (HMAC over both sides' nonces) before the first frame.
What is sent is not encrypted: prompts travel as token ids, so the network between the hosts has to be a
private one.

Invariant: a frame is received whole or `PeerGone` is raised; `send` may be called by several threads.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxserve.errors import JaxserveError

SECRET_BYTES = 32
MAX_HEADER_BYTES = 2**26
MAX_PAYLOAD_BYTES = 2**38
_ALIGN = 64  # each array begins at such a place, so that it can be used where it lies
_PREFIX = struct.Struct("<4sIQ")  # magic, bytes of the header, bytes of the payload
_MAGIC = b"jxs1"
_PROOF_BYTES = hashlib.sha256().digest_size
DTYPES = {
    name: np.dtype(name)
    for name in ("bool", "int8", "uint8", "int32", "uint32", "float16", "float32", "int64")
} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
# A host that loses its power closes nothing: after 5 s of silence it is asked, and given up after 15 more.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class PeerGone(Exception):
    """The other side has closed the connection, or cannot be reached any more."""


class WireError(JaxserveError):
    """What came is no message of this protocol."""


class Message(NamedTuple):
    """What one side tells the other."""

    kind: str
    fields: dict[str, Any]
    arrays: list[np.ndarray]  # read-only


class Wire:
    """A connection.

    Args:
        connection: to a peer that has proved itself; of this wire alone from now on.
    """

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket = connection
        self._sending = threading.Lock()

    def send(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        arrays: Sequence[np.ndarray] = (),
    ) -> None:
        """Sends one message.

        Args:
            kind: what it is.
            fields: JSON.
            arrays: of DTYPES.

        Raises:
            PeerGone: nobody takes it.
        """
        data = frame(kind, fields or {}, arrays)
        try:
            with self._sending:
                for part in data:
                    self._socket.sendall(part)
        except OSError as error:
            raise PeerGone(str(error)) from error

    def receive(self) -> Message:
        """The next message; waits for it.

        Raises:
            PeerGone: none will come.
            WireError: what came is none.
        """
        magic, num_header, num_payload = _PREFIX.unpack(self._read(_PREFIX.size))
        if magic != _MAGIC or num_header > MAX_HEADER_BYTES or num_payload > MAX_PAYLOAD_BYTES:
            raise WireError(f"a frame begins with {magic!r}, {num_header} and {num_payload} bytes")
        header = self._read(num_header)
        return parse(bytes(header), self._read(num_payload))

    def close(self) -> None:
        """Closes; the peer's `receive` raises, and that of another thread here."""
        with contextlib.suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray:
        try:
            return _read_all(self._socket, num_bytes)
        except OSError as error:
            raise PeerGone(str(error)) from error


def frame(kind: str, fields: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> list[bytes]:
    """A message as it is sent, in parts."""
    kept = [np.ascontiguousarray(one) for one in arrays]
    described = [
        [_name(one.dtype), *np.shape(given)] for one, given in zip(kept, arrays, strict=True)
    ]
    header = json.dumps([kind, fields, described], separators=(",", ":"), allow_nan=False).encode()
    parts, num_payload = [], 0
    for one in kept:
        padding = -num_payload % _ALIGN
        parts += [bytes(padding), one.tobytes()]
        num_payload += padding + one.nbytes
    prefix = _PREFIX.pack(_MAGIC, len(header), num_payload)
    if num_payload <= 2**20:  # one call of the system for all of it
        return [b"".join((prefix, header, *parts))]
    return [prefix + header, *parts]


def parse(header: bytes, payload: bytearray) -> Message:
    """The message of a frame; its arrays lie in `payload`.

    Raises:
        WireError: it is none.
    """
    try:
        kind, fields, described = json.loads(header)
        arrays, begin = [], 0
        for name, *shape in described:
            begin += -begin % _ALIGN
            count = int(np.prod(shape, dtype=np.int64)) if min(shape, default=0) >= 0 else -1
            if count < 0:
                raise ValueError(f"shape {shape}")
            one = np.frombuffer(payload, DTYPES[name], count, begin).reshape(shape)
            one.flags.writeable = False
            arrays.append(one)
            begin += one.nbytes
        if not isinstance(kind, str) or not isinstance(fields, dict) or begin != len(payload):
            raise ValueError(f"{begin} bytes of arrays, {len(payload)} came")
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise WireError(
            f"a message that cannot be read: {type(error).__name__}: {error}"
        ) from error
    return Message(kind, fields, arrays)


def prove_as_follower(connection: socket.socket, secret: bytes, process_id: int) -> None:
    """Shows the leader that this side has the secret, and has it shown.

    Raises:
        PeerGone: the leader has not shown it.
    """
    own = secrets.token_bytes(SECRET_BYTES)
    connection.sendall(own)
    theirs = bytes(_read_all(connection, SECRET_BYTES))
    proof = bytes(_read_all(connection, _PROOF_BYTES))
    if not hmac.compare_digest(proof, _proof(secret, b"leader", own, theirs)):
        raise PeerGone("the other side has another secret: it is no leader of this run")
    number = process_id.to_bytes(4, "big")
    connection.sendall(number + _proof(secret, b"follower" + number, theirs, own))


def accept_follower(connection: socket.socket, secret: bytes) -> int:
    """The other side of `prove_as_follower`; the follower's process_id.

    Raises:
        PeerGone: the other side has not shown that it has the secret.
    """
    theirs = bytes(_read_all(connection, SECRET_BYTES))
    own = secrets.token_bytes(SECRET_BYTES)
    connection.sendall(own + _proof(secret, b"leader", theirs, own))
    number = bytes(_read_all(connection, 4))
    proof = bytes(_read_all(connection, _PROOF_BYTES))
    if not hmac.compare_digest(proof, _proof(secret, b"follower" + number, own, theirs)):
        raise PeerGone("the other side has another secret: it is no follower of this run")
    return int.from_bytes(number, "big")


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, role + first + second, "sha256")


def _read_all(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view, begin = memoryview(data), 0
    while begin < num_bytes:
        count = connection.recv_into(view[begin:])
        if not count:
            raise PeerGone("the connection was closed")
        begin += count
    return data


def _name(dtype: np.dtype) -> str:
    if dtype.name not in DTYPES:
        raise TypeError(f"arrays of {dtype} cannot be sent")
    return dtype.name
