"""Records in order, whatever order they come in and whatever is left behind by a kill."""

import json
import math
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxserve.cli import run_output
from jaxserve.cli.output_files import OutputError, partial_path
from jaxserve.cli.request_line import RequestLine
from jaxserve.cli.resume import cut_torn, recover
from jaxserve.cli.run_output import (
    MAX_MESSAGE_LENGTH,
    OrderedWriter,
    encode_record,
    error_record,
    success_record,
)
from jaxserve.errors import InvalidRequestError
from jaxserve.request import CompletionOutput, RequestOutput, SamplingParams
from tests.cli.conftest import read_records


def record(index: int, **fields: object) -> dict[str, object]:
    return {"index": index, "id": None, "text": "x" * index, **fields}


def open_writer(output: Path) -> OrderedWriter:
    found = recover(output, 8)
    cut_torn(found)
    return OrderedWriter.to_file(output, next_index=found.next_index, waiting=found.waiting)


@given(st.permutations(range(8)), st.integers(0, 8), st.integers(0, 60), st.integers(0, 60))
def test_any_order_any_kill_any_torn_line(tmp_path_factory, order, num_before, torn, torn_partial):
    """Some records in some order, a kill, torn lines, and on: nothing is lost or written twice."""
    output = tmp_path_factory.mktemp("out") / "o.jsonl"
    writer = open_writer(output)
    for index in order[:num_before]:
        writer.put(index, record(index))
        done = len(read_records(output))
        assert done == writer.next_index
        assert len(read_records(partial_path(output))) >= writer.num_waiting
        assert writer.num_waiting or partial_path(output).stat().st_size == 0
    # The kill: the files are as they were before a close tidies up; a record was being written to each.
    found = {path: path.read_bytes() for path in (output, partial_path(output))}
    writer.close()
    for path, data in found.items():
        path.write_bytes(data)
    for path, size in ((output, torn), (partial_path(output), torn_partial)):
        with open(path, "ab") as stream:
            stream.write(encode_record(record(7, filler="y" * 50))[:-1][:size])
    writer = open_writer(output)
    assert writer.num_done == num_before
    assert all(writer.has(index) for index in order[:num_before])
    for index in order[num_before:]:
        assert not writer.has(index)
        writer.put(index, record(index))
    writer.close()
    assert read_records(output) == [record(index) for index in range(8)]
    assert not partial_path(output).exists()


@given(st.permutations(range(6)), st.integers(0, 6))
def test_a_close_leaves_only_what_waits_and_it_can_be_gone_on_with(
    tmp_path_factory, order, num_before
):
    output = tmp_path_factory.mktemp("out") / "o.jsonl"
    writer = open_writer(output)
    for index in order[:num_before]:
        writer.put(index, record(index))
    num_in_output = writer.next_index
    writer.close()
    waiting = sorted(index for index in order[:num_before] if index > num_in_output)
    partial = partial_path(output)
    assert read_records(output) == [record(index) for index in range(num_in_output)]
    assert (read_records(partial) if partial.exists() else []) == [record(i) for i in waiting]
    assert partial.exists() == bool(waiting)
    with open_writer(output) as writer:
        for index in order[num_before:]:
            writer.put(index, record(index))
    assert read_records(output) == [record(index) for index in range(6)]
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_a_partial_file_that_cannot_be_rewritten_stays_as_it_is(tmp_path, monkeypatch):
    output = tmp_path / "o.jsonl"
    writer = open_writer(output)
    for index in (1, 3, 0):
        writer.put(index, record(index))
    before = partial_path(output).read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_output.os, "replace", full)
    writer.close()
    assert partial_path(output).read_bytes() == before
    assert recover(output, 8).num_done == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        output.name,
        partial_path(output).name,
    ]


def test_a_kill_between_the_output_and_the_partial_file_repeats_nothing(tmp_path):
    output = tmp_path / "o.jsonl"
    output.write_bytes(encode_record(record(0)) + encode_record(record(1)))
    waiting = encode_record(record(1)) + encode_record(record(3)) + encode_record(record(2))
    partial_path(output).write_bytes(waiting)
    with open_writer(output) as writer:
        assert writer.next_index == 4
    assert read_records(output) == [record(index) for index in range(4)]
    assert not partial_path(output).exists()


def test_failed_lines_are_counted_in_both_files(tmp_path):
    output = tmp_path / "o.jsonl"
    output.write_bytes(encode_record(record(0, error={})) + encode_record(record(1)))
    partial_path(output).write_bytes(encode_record(record(3, error={})))
    assert recover(output, 8).num_failed == 2


def test_records_are_valid_json_on_one_line():
    data = encode_record({"id": "a\u2028b\u2029\x85\nc\x1c\r", "text": "héllo 😀"})
    text = data.decode()
    assert len(text.splitlines()) == 1
    assert "héllo 😀" in text
    assert json.loads(text) == {"id": "a\u2028b\u2029\x85\nc\x1c\r", "text": "héllo 😀"}
    half = {"id": "\ud83d", "text": "é"}
    assert json.loads(encode_record(half)) == half


def output_of(logprobs: list[float] | None) -> RequestOutput:
    completion = CompletionOutput(
        index=0, text="ab", token_ids=[5, 6], logprobs=logprobs, finish_reason="stop"
    )
    return RequestOutput(
        request_id="3",
        outputs=[completion],
        num_prompt_tokens=4,
        num_cached_tokens=1,
        finished=True,
    )


def test_success_record():
    expected = {
        "index": 3,
        "id": "a",
        "text": "ab",
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "num_prompt_tokens": 4,
        "num_cached_tokens": 1,
        "num_output_tokens": 2,
    }
    assert success_record(RequestLine(index=3, id="a"), output_of(None)) == expected
    asked = RequestLine(index=3, id="a", params=SamplingParams(logprobs=True))
    made = success_record(asked, output_of([-0.5, -math.inf]))
    assert made == {**expected, "logprobs": [-0.5, None]}
    assert b"NaN" not in encode_record(made)


def test_error_record_names_the_line_and_is_bounded():
    error = InvalidRequestError("bad " + "x" * 10**6, param="stop", code="c")
    made = error_record(RequestLine(index=3, id=7), error)
    assert (made["index"], made["id"]) == (3, 7)
    body = made["error"]
    assert body["message"].startswith("line 4: bad x")  # type: ignore[index]
    assert len(body["message"]) == MAX_MESSAGE_LENGTH  # type: ignore[index]
    assert {**body, "message": ""} == {  # type: ignore[dict-item]
        "message": "",
        "type": "invalid_request_error",
        "param": "stop",
        "code": "c",
    }


def test_a_full_disk_is_said():
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    with OrderedWriter.to_stream(str(full)) as writer, pytest.raises(OutputError, match="No space"):
        writer.put(0, record(0))


def test_a_stream_keeps_waiting_records_without_a_file_of_its_own(tmp_path, capsysbinary):
    with OrderedWriter.to_stream("-") as writer:
        writer.put(1, record(1))
        writer.put(0, record(0))
    lines = capsysbinary.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [record(0), record(1)]
