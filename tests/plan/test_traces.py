"""Trace files: what they say, which prompts share tokens, and what is refused."""

import json
from array import array
from pathlib import Path

import numpy as np
import pytest

from jaxserve.plan.traces import BLOCK_SIZE, MAX_TRACE_TOKENS, TraceError, read_trace

DATA = Path(__file__).parent / "data"
GOOD = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [10, 11]}
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46.6805900,374,44"


def mooncake(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return read_trace(path, "mooncake")


def azure(tmp_path, *lines):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines))
    return read_trace(path, "azure")


def test_the_mooncake_slices():
    trace = read_trace(DATA / "mooncake_conversation.jsonl", "mooncake")
    assert len(trace.requests) == 400
    first = trace.requests[0]
    assert (first.num_prompt_tokens, first.num_output_tokens, first.arrival_s) == (6758, 500, 0.0)
    assert trace.name == "mooncake_conversation.jsonl"
    assert trace.has_blocks
    lines = (DATA / "mooncake_conversation.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert trace.num_prompt_tokens == sum(one["input_length"] for one in records)
    assert trace.num_output_tokens == sum(one["output_length"] for one in records)
    assert trace.longest == max(one["input_length"] + one["output_length"] for one in records)
    assert trace.requests[-1].arrival_s == records[-1]["timestamp"] / 1000


def test_the_azure_slices():
    trace = read_trace(DATA / "azure_conv.csv", "azure")
    assert len(trace.requests) == 200
    second = trace.requests[1]
    assert (second.num_prompt_tokens, second.num_output_tokens) == (396, 109)
    assert second.arrival_s == pytest.approx(50.9951690 - 46.6805900, abs=1e-6)
    assert not trace.has_blocks
    assert len(read_trace(DATA / "azure_code.csv", "azure", max_requests=7).requests) == 7


def test_equal_ids_are_equal_tokens_and_nothing_else_is(tmp_path):
    lines = [
        {**GOOD, "input_length": 1500, "hash_ids": [3, 70, 5]},
        {**GOOD, "input_length": 1100, "hash_ids": [3, 70, 9]},
        {**GOOD, "input_length": 512, "hash_ids": [70]},
    ]
    one, two, three = (r.prompt_token_ids() for r in mooncake(tmp_path, *lines).requests)
    assert [len(ids) for ids in (one, two, three)] == [1500, 1100, 512]
    assert one.typecode == "i"
    assert one[:1024] == two[:1024]
    assert one[512:1024] == three
    assert not set(one[1024:]) & set(two[1024:])
    assert len(set(one)) == len(one)
    assert min(one) >= 0


def test_whole_blocks_fill_the_last_one(tmp_path):
    (request,) = mooncake(tmp_path, GOOD).requests
    assert request.num_padded_prompt_tokens == 1024
    padded = request.prompt_token_ids(whole_blocks=True)
    assert len(padded) == 1024
    assert padded[:600] == request.prompt_token_ids()


def test_ids_may_be_any_64_bit_numbers(tmp_path):
    wide = {**GOOD, "hash_ids": [2**64 - 1, -(2**63)]}
    (request,) = mooncake(tmp_path, wide).requests
    assert request.blocks is not None
    assert request.blocks.tolist() == [0, 1]
    assert request.blocks.dtype == np.int32


def test_prompts_without_blocks_share_nothing(tmp_path):
    one, two = (r.prompt_token_ids() for r in azure(tmp_path, HEADER, ROW, ROW).requests)
    assert one == array("i", [0]) * 374
    assert two == array("i", [1]) * 374


def test_arrivals_count_from_the_first_request(tmp_path):
    late = mooncake(tmp_path, {**GOOD, "timestamp": 1500}, "", {**GOOD, "timestamp": 2750})
    assert [one.arrival_s for one in late.requests] == [0.0, 1.25]
    assert [one.index for one in late.requests] == [0, 1]


def test_no_slice_repeats_a_partial_block_with_another_length():
    """What makes cutting the last block right; see `TraceRequest.prompt_token_ids`."""
    for name in ("mooncake_conversation.jsonl", "mooncake_synthetic.jsonl"):
        length_of: dict[int, int] = {}
        for request in read_trace(DATA / name, "mooncake").requests:
            assert request.blocks is not None
            rest = request.num_prompt_tokens - (len(request.blocks) - 1) * BLOCK_SIZE
            for index, block in enumerate(request.blocks.tolist()):
                length = rest if index == len(request.blocks) - 1 else BLOCK_SIZE
                assert length_of.setdefault(block, length) == length


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", r"must be a JSON object, got \[1\]"),
        ({**GOOD, "timestamp": None}, "timestamp must be milliseconds .* got None"),
        ({**GOOD, "timestamp": True}, "timestamp must be milliseconds .* got True"),
        ({**GOOD, "timestamp": -1}, "timestamp must be milliseconds .* got -1"),
        ('{"timestamp": NaN}', "timestamp must be milliseconds .* got nan"),
        ({**GOOD, "timestamp": 4}, "timestamp must not be before that of .* it is -0.001 s"),
        ({**GOOD, "input_length": 0}, r"input_length must be an integer in \[1, .* got 0"),
        ({**GOOD, "input_length": 6.5}, "input_length must be an integer .* got 6.5"),
        ({**GOOD, "input_length": MAX_TRACE_TOKENS + 1}, "input_length must be an integer"),
        ({**GOOD, "output_length": 0}, "output_length must be an integer .* got 0"),
        ({**GOOD, "output_length": "7"}, "output_length must be an integer .* got '7'"),
        (
            {**GOOD, "hash_ids": None},
            "hash_ids must be a list of 2 ids.* input_length 600, got None",
        ),
        ({**GOOD, "hash_ids": [1]}, r"hash_ids must be a list of 2 ids.* got \[1\]"),
        ({**GOOD, "hash_ids": [1, 2.0]}, "hash_ids must be an integer .* got 2.0"),
        ({**GOOD, "hash_ids": [1, 2**64]}, "hash_ids must be an integer"),
    ],
)
def test_a_bad_mooncake_line_is_named(tmp_path, line, fault):
    with pytest.raises(TraceError, match=rf"trace.jsonl: line 2: {fault}"):
        mooncake(tmp_path, GOOD, line)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("2023-11-16 18:15:46.6805900,374", "must hold 3 fields"),
        ("yesterday,374,44", "TIMESTAMP must be a date and time .* got 'yesterday'"),
        ("2023-11-16 18:15:46+00:00,374,44", "TIMESTAMP must be like the first"),
        ("2023-11-16 18:15:45,374,44", "timestamp must not be before .* it is -1.6[0-9]* s"),
        ("2023-11-16 18:15:47,0,44", "ContextTokens must be an integer .* got 0"),
        ("2023-11-16 18:15:47,,44", "ContextTokens must be an integer .* got ''"),
        ("2023-11-16 18:15:47,374,4.5", "GeneratedTokens must be an integer .* got '4.5'"),
        ("2023-11-16 18:15:47,374,-4", "GeneratedTokens must be an integer .* got '-4'"),
        ("2023-11-16 18:15:47,374," + "9" * 5000, "GeneratedTokens must be an integer"),
    ],
)
def test_a_bad_azure_line_is_named(tmp_path, line, fault):
    with pytest.raises(TraceError, match=rf"trace.csv: line 3: {fault}"):
        azure(tmp_path, HEADER, ROW, line)


def test_files_that_hold_no_trace(tmp_path):
    with pytest.raises(TraceError, match=r"cannot read 'a.x00b': embedded null byte"):
        read_trace("a\0b", "mooncake")
    with pytest.raises(TraceError, match=r"cannot read .*none.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl", "mooncake")
    with pytest.raises(TraceError, match="holds no requests"):
        mooncake(tmp_path, "")
    with pytest.raises(TraceError, match="holds no requests"):
        azure(tmp_path, HEADER)
    with pytest.raises(TraceError, match=r"line 1: must be TIMESTAMP,.*, got \['a', 'b'\]"):
        azure(tmp_path, "a,b")
    with pytest.raises(TraceError, match=r"line 1: must be TIMESTAMP,.*, got None"):
        azure(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="binary: not UTF-8 text"):
        read_trace(tmp_path / "binary", "azure")
