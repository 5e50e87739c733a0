"""Bytes -> lines."""

import io
import os

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxserve.cli import run_input
from jaxserve.cli.run_input import PipedLines, open_input, open_prompts, split_lines


def split(data: bytes, chunk_bytes: int = 3) -> list[bytes]:
    stream = io.BytesIO(data)
    return list(split_lines(lambda: stream.read(chunk_bytes)))


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\n\n", [b"a", b""]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"a\rb\n", [b"a\rb"]),
        (b"\r", [b""]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", [b"a", b"\xef\xbb\xbfb"]),
        (
            "a\u2028b\u2029c\x85d\x0be\x1cf\nx".encode(),
            ["a\u2028b\u2029c\x85d\x0be\x1cf".encode(), b"x"],
        ),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 2, 1000])
def test_only_a_newline_ends_a_line(data, lines, chunk_bytes):
    assert split(data, chunk_bytes) == lines


@given(st.lists(st.binary(max_size=9).filter(lambda x: b"\n" not in x)), st.integers(1, 7))
def test_lines_come_back_whatever_the_chunks(lines, chunk_bytes):
    lines = [line for line in lines if not line.endswith(b"\r") and not line.startswith(b"\xef")]
    assert split(b"".join(line + b"\n" for line in lines), chunk_bytes) == lines


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_whole(monkeypatch):
    monkeypatch.setattr(run_input, "MAX_LINE_BYTES", 10)
    assert split(b"x" * 1000 + b"\nshort\n" + b"y" * 10 + b"\n") == [b"x" * 11, b"short", b"y" * 10]


def test_a_file_is_surveyed(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\nb\n\nc")
    source = open_input(str(path))
    assert source.num_lines == 4
    lines = []
    while not source.lines.exhausted:
        lines.append(source.lines.next_line(wait=False))
    assert lines == [b"a", b"b", b"", b"c", None]
    path.write_bytes(b"a\nb\n\nc\n")
    assert open_input(str(path)).num_lines == 4
    assert open_input(str(path)).sha256 != source.sha256


def test_prompts_differ_from_other_prompts():
    assert open_prompts(["a", "bc"]).sha256 != open_prompts(["ab", "c"]).sha256
    assert open_prompts(["a", "b\nc\r"]).lines.next_line(wait=False) == b"a"


def test_a_pipe_never_keeps_the_engine_waiting():
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as stream:
        lines = PipedLines(stream)
        assert lines.next_line(wait=False) is None
        assert lines.next_line(wait=True) is None
        assert not lines.exhausted
        os.write(writing, b"a\nb")
        while (line := lines.next_line(wait=True)) is None:
            assert not lines.exhausted
        assert line == b"a"
        os.close(writing)
        rest = []
        while not lines.exhausted:
            rest.append(lines.next_line(wait=True))
        assert [line for line in rest if line is not None] == [b"b"]
