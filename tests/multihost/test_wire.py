import contextlib
import threading

import ml_dtypes
import numpy as np
import pytest

from jaxserve.multihost.wire import (
    DTYPES,
    PeerGone,
    Wire,
    WireError,
    accept_follower,
    frame,
    parse,
    prove_as_follower,
)
from tests.multihost import lines

SECRET = bytes(range(32))


@pytest.fixture
def ends():
    with contextlib.ExitStack() as stack:

        def make():
            return tuple(stack.enter_context(end) for end in lines.tcp_pair())

        yield make


@pytest.fixture
def wires(ends):
    return tuple(map(Wire, ends()))


def test_what_is_sent_arrives(wires):
    a, b = wires
    arrays = [
        np.arange(7, dtype=np.int32).reshape(7, 1),
        np.zeros((2, 0), np.int32),
        np.array([True, False, True]),
        np.float32(np.random.default_rng(0).normal(size=(3, 5)))[:, ::2],
        np.array(4, np.uint32),
        np.ones((2, 3), ml_dtypes.bfloat16),
    ]
    a.send("kind", {"x": [1, None, {"y": True}]}, arrays)
    a.send("next")
    kind, fields, found = b.receive()
    assert (kind, fields) == ("kind", {"x": [1, None, {"y": True}]})
    for sent, got in zip(arrays, found, strict=True):
        assert sent.dtype == got.dtype
        assert sent.shape == got.shape
        assert (sent == got).all()
        assert not got.flags.writeable
        assert not got.size or got.ctypes.data % got.itemsize == 0
    assert b.receive() == ("next", {}, [])


def test_large_arrays_arrive_whole(wires):
    a, b = wires
    large = np.arange(3 * 2**20, dtype=np.int32)
    sender = threading.Thread(target=a.send, args=("big", {}, [large, large[:5]]))
    sender.start()
    _, _, (first, second) = b.receive()
    sender.join()
    assert (first == large).all()
    assert (second == large[:5]).all()


def test_a_closed_line_says_so_on_both_sides(wires, ends):
    a, b = wires
    a.close()
    with pytest.raises(PeerGone):
        b.receive()
    with pytest.raises(PeerGone):
        b.send("x", {}, [np.zeros(10**7, np.int32)])
    c, d = ends()
    d.sendall(b"jxs1\x05\x00")  # cut in the middle of a frame
    d.close()
    with pytest.raises(PeerGone):
        Wire(c).receive()
    c.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"jxs1" + b"\xff" * 12,
        b"jxs1" + b"\x03\x00\x00\x00" + b"\x00" * 8 + b"[1]",
    ],
)
def test_what_is_no_frame_is_refused(data, ends):
    a, b = ends()
    b.sendall(data)
    with pytest.raises(WireError):
        Wire(a).receive()
    a.close()
    b.close()


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        (b'["k",{},[["object",1]]]', bytes(8)),
        (b'["k",{},[["int32",-1]]]', bytes(8)),
        (b'["k",{},[["int32",4611686018427387904,4]]]', bytes(8)),
        (b'["k",{},[["int32",3]]]', bytes(8)),
        (b'["k",{},[["int32",1]]]', bytes(8)),
        (b'["k",{},[["int32",1.5]]]', bytes(8)),
        (b'["k",[],[]]', b""),
        (b"[1,{},[]]", b""),
        (b'["k",{}]', b""),
        (b'["k",{},[[]]]', b""),
        (b"\xff\xfe", b""),
        (b"nonsense", b""),
    ],
)
def test_a_header_that_describes_no_message_is_refused(header, payload):
    with pytest.raises(WireError):
        parse(header, bytearray(payload))


def test_only_numbers_can_be_sent():
    assert all(dtype.kind not in "OSU" for dtype in DTYPES.values())
    for array in (np.array(["a"]), np.array([object()]), np.zeros(1, np.complex64)):
        with pytest.raises(TypeError, match="cannot be sent"):
            frame("k", {}, [array])
    with pytest.raises(ValueError, match="JSON"):
        frame("k", {"x": float("nan")}, [])


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [(SECRET, None), (bytes(32), PeerGone), (SECRET[:-1] + b"x", PeerGone)],
    ids=["right", "none", "nearly"],
)
def test_both_sides_prove_that_they_have_the_secret(theirs, expected, ends):
    a, b = ends()
    found: list[object] = []

    def follower():
        try:
            prove_as_follower(b, theirs, 3)
            found.append(None)
        except (PeerGone, OSError) as error:
            found.append(type(error))
            b.close()

    thread = threading.Thread(target=follower)
    thread.start()
    if expected is None:
        assert accept_follower(a, SECRET) == 3
    else:
        with pytest.raises(PeerGone):
            accept_follower(a, SECRET)
        a.close()
    thread.join()
    assert found == [expected]


def test_a_proof_heard_before_proves_nothing(ends):
    """Another connection has another nonce."""
    a, b = ends()
    heard: list[bytes] = []
    send = b.sendall

    class Tapped:
        def sendall(self, data):
            heard.append(bytes(data))
            send(data)

        def recv_into(self, view):
            return b.recv_into(view)

    thread = threading.Thread(target=prove_as_follower, args=(Tapped(), SECRET, 1))
    thread.start()
    assert accept_follower(a, SECRET) == 1
    thread.join()
    a, b = ends()
    for data in heard:
        b.sendall(data)
    with pytest.raises(PeerGone):
        accept_follower(a, SECRET)
