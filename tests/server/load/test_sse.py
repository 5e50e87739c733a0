"""Events come out whole, however the bytes are cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.load import sse
from jaxserve.server.load.sse import EventError, EventParser

STREAM = (
    b'data: {"a": 1}\n\n: ping\n\nevent: x\nid: 3\ndata:{"b": "\xc3\xa9"}\n\n'
    b"data: one\ndata: two\n\nretry: 10\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b"one\ntwo", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM))), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_any_cut_gives_the_same_events(cuts, newline):
    stream = STREAM.replace(b"\n", newline)
    ends = [0, *sorted(cuts), len(stream)]
    parser = EventParser()
    found = [e for a, b in itertools.pairwise(ends) for e in parser.feed(stream[a:b])]
    found += parser.feed(b"\n")  # a lone "\r" at the very end waits for this one
    assert found == EVENTS


def test_every_byte_alone():
    parser = EventParser()
    assert [e for i in range(len(STREAM)) for e in parser.feed(STREAM[i : i + 1])] == EVENTS


def test_an_event_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    parser.feed(b"data: " + b"x" * 90)
    with pytest.raises(EventError, match="longer than 100 bytes"):
        parser.feed(b"x" * 90)
