"""Who made an output, and what is refused."""

import pytest

from jaxserve.cli.arguments import UsageError
from jaxserve.cli.output_files import meta_path, partial_path
from jaxserve.cli.resume import (
    check_identity,
    cut_torn,
    has_records,
    model_fingerprint,
    recover,
    write_identity,
)
from jaxserve.cli.run_output import encode_record

IDENTITY = {
    "input": {"sha256": "aa", "is_text": False},
    "model": {"sha256": "bb"},
    "sampling": {"temperature": 0.5, "stop": ["x"], "seed": 0},
}


def test_the_same_run_is_recognised(tmp_path):
    output = tmp_path / "o.jsonl"
    write_identity(output, IDENTITY)
    check_identity(output, IDENTITY)
    assert [path.name for path in tmp_path.iterdir()] == ["o.jsonl.meta.json"]


@pytest.mark.parametrize(
    ("branch", "fields", "message"),
    [
        ("input", {"sha256": "cc"}, "the input file has changed; "),
        ("model", {"sha256": "cc"}, "the model has changed; "),
        (
            "input",
            {"sha256": "cc", "is_text": True},
            r"changed, it was made with another input \(is_text: False then, True now\)",
        ),
        ("sampling", {"seed": 1}, r"made with another sampling \(seed: 0 then, 1 now\); "),
        ("sampling", {"stop": []}, r"another sampling \(stop: \['x'\] then, \[\] now\)"),
        ("sampling", {"top_k": 3}, r"another sampling \(top_k: None then, 3 now\)"),
    ],
)
def test_another_run_is_refused_by_what_differs(tmp_path, branch, fields, message):
    output = tmp_path / "o.jsonl"
    write_identity(output, IDENTITY)
    with pytest.raises(UsageError, match=f"{message}.*give --overwrite, or another --output$"):
        check_identity(output, {**IDENTITY, branch: {**IDENTITY[branch], **fields}})


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"format": 99}', b"\xff"])
def test_a_missing_or_broken_identity_is_refused(tmp_path, content):
    output = tmp_path / "o.jsonl"
    if content is not None:
        meta_path(output).write_bytes(content)
    with pytest.raises(UsageError, match=r"cannot resume .*meta\.json.*; give --overwrite"):
        check_identity(output, IDENTITY)


def test_model_fingerprint_follows_content_and_not_place(tmp_path):
    def make(name: str) -> tuple:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(5_000_000))
        return folder, folder / "model.safetensors"

    (first, _), (second, weights) = make("a"), make("b")
    (second / "README.md").write_text("not part of the model")
    assert model_fingerprint(first) == model_fingerprint(second)
    with open(weights, "r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"x")
    assert model_fingerprint(first) != model_fingerprint(second)
    assert model_fingerprint(weights) != model_fingerprint(first / "model.safetensors")
    weights.write_bytes(bytes(5_000_001))
    assert model_fingerprint(first) != model_fingerprint(second)


def test_has_records(tmp_path):
    output = tmp_path / "o.jsonl"
    assert not has_records(output)
    output.touch()
    assert not has_records(output)
    partial_path(output).write_text("x")
    assert has_records(output)


BAD = [b"{}\n", b"garbage\n", b'{"index": true}\n', b'{"index": 5}\n', b'{"index": -1}\n']


@pytest.mark.parametrize("bad", [*BAD, b"[" * 100_000 + b"\n"])
def test_an_output_that_no_run_can_have_written_is_not_touched(tmp_path, bad):
    output = tmp_path / "o.jsonl"
    content = encode_record({"index": 0}) + bad + encode_record({"index": 2})
    output.write_bytes(content)
    with pytest.raises(UsageError, match=r"its line 2 .*; give --overwrite"):
        recover(output, 9)
    assert output.read_bytes() == content


@pytest.mark.parametrize(
    "last", [b"hello\n", b"hello", b"\n", b'{"id": 3', b'{"index": "x"}\n', b'"']
)
def test_a_last_line_that_is_no_torn_record_is_not_thrown_away(tmp_path, last):
    output = tmp_path / "o.jsonl"
    for path, words in (
        (output, "its line 1 is no record"),
        (partial_path(output), r"o\.jsonl\.partial\.jsonl beside it, line 1 is no record"),
    ):
        path.write_bytes(last)
        with pytest.raises(UsageError, match=words):
            recover(output, 9)
        assert path.read_bytes() == last
        path.unlink()


@pytest.mark.parametrize("size", [1, 5, 11, 12, 13, 30])
@pytest.mark.parametrize("tail", [b"", b"\0" * 7])
def test_a_torn_record_is_cut_off_when_it_is_time(tmp_path, size, tail):
    output = tmp_path / "o.jsonl"
    torn = encode_record({"index": 10, "text": "x" * 50})[:size] + tail
    whole = encode_record({"index": 0, "error": {}})
    output.write_bytes(whole + torn)
    partial_path(output).write_bytes(torn)
    found = recover(output, 20)
    assert (found.next_index, found.num_failed, found.waiting) == (1, 1, {})
    assert output.read_bytes() == whole + torn, "reading changed the file"
    cut_torn(found)
    assert output.read_bytes() == whole
    assert partial_path(output).read_bytes() == b""


def test_more_records_than_lines_are_refused(tmp_path):
    output = tmp_path / "o.jsonl"
    output.write_bytes(encode_record({"index": 0}) + encode_record({"index": 1}))
    assert recover(output, 2).num_done == 2
    with pytest.raises(UsageError, match="its line 2 holds index 1, the input has 1 line"):
        recover(output, 1)
    output.unlink()
    partial_path(output).write_bytes(encode_record({"index": 4}))
    with pytest.raises(UsageError, match="line 1 holds index 4, the input has 4 lines"):
        recover(output, 4)
