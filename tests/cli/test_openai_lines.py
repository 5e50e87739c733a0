"""C45: OpenAI batch files through `jaxserve run`, over the fake engine."""

import asyncio
import json
import os
import sys
import threading

import pytest

from jaxserve.cli import text_engine
from jaxserve.cli.openai_lines import looks_like_openai
from jaxserve.request import Request
from jaxserve.server import openai
from jaxserve.text.watcher import StopWatcher
from tests.cli.conftest import read_records
from tests.cli.fake_llm import FakeLLM
from tests.server.conftest import serving
from tests.server.fake_client import FakeEngineClient
from tests.server.replies import check_schema

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class TokenizedLLM(FakeLLM):
    """`FakeLLM` with the texts of its tokenizer, as a server over the same fake has them."""

    def add(self, request_id, prompt_token_ids, params, *, priority=0, cache_salt=None):
        request = Request(
            id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            priority=priority,
            cache_salt=cache_salt,
        )
        watchers = [
            StopWatcher(self.tokenizer, stop=params.stop, min_tokens=params.min_tokens)
            for _ in range(params.n)
        ]
        self.engine.add(request, watchers)


@pytest.fixture
def tokenized(run, monkeypatch):
    monkeypatch.setattr(
        text_engine, "load_llm", lambda model, options: TokenizedLLM(model, **options)
    )
    return lambda *arguments: run("--max-model-len=256", *arguments)


def line(custom_id, url=COMPLETIONS, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path, lines):
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    path.write_bytes("\r\n".join(texts).encode())
    return path


GOOD = [
    line("first", prompt="hello", max_tokens=4),
    line("two", CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=5, logprobs=True),
    line("many", prompt=["a", "b", "c"], n=2, max_tokens=3, echo=True, temperature=0),
    line("e\u2028", prompt="emoji 😀 and \u2028 in it", max_tokens=3, logprobs=2),
]
TWELVE = [
    "\ufeff" + json.dumps(GOOD[0]),
    "[1,2]",
    "null",
    '"x"',
    "{broken",
    "",
    line("first", prompt="again"),
    {"method": "POST", "url": COMPLETIONS, "body": {"prompt": "no id"}},
    line("u", prompt="ok", colour="blue", max_tokens=2),
    line("long", prompt="x" * 3000),
    line("s", prompt="ok", stream=True),
    json.dumps(GOOD[3], ensure_ascii=False),
]


def test_c45_results_are_the_replies_of_the_server(tokenized, tmp_path):
    source, output = write(tmp_path / "in.jsonl", GOOD), tmp_path / "out.jsonl"
    assert tokenized(f"--input={source}", f"--output={output}") == 0
    records = read_records(output)

    async def replies():
        client = FakeEngineClient(eos_token_ids=(), page_size=4)
        async with serving(client, model="x/model") as http:
            return [(await http.post(one["url"], json=one["body"])).json() for one in GOOD]

    volatile = ("id", "created", "system_fingerprint")
    for record, reply, one in zip(records, asyncio.run(replies()), GOOD, strict=True):
        body = record["response"]["body"]
        is_chat = one["url"] == CHAT
        check_schema(
            "CreateChatCompletionResponse" if is_chat else "CreateCompletionResponse", body
        )
        reply["usage"].pop("prompt_tokens_details")  # what is cached depends on what ran before
        assert {k: v for k, v in body.items() if k not in volatile} == {
            k: v for k, v in reply.items() if k not in volatile
        }
        assert list(record) == ["index", "id", "custom_id", "response", "error"]
        assert record["custom_id"] == one["custom_id"]
        assert record["error"] is None
        assert record["response"]["status_code"] == 200


def test_c45_twelve_lines_each_get_their_record(tokenized, tmp_path, capsys):
    source, output = write(tmp_path / "in.jsonl", TWELVE), tmp_path / "out.jsonl"
    assert tokenized(f"--input={source}", f"--output={output}") == 1
    records = read_records(output)
    assert [one["index"] for one in records] == list(range(12))
    good = [one["index"] for one in records if one["error"] is None]
    assert good == [0, 8, 11]
    ids = ["first", None, None, None, None, None, "first", None, "u", "long", "s", "e\u2028"]
    assert [one["custom_id"] for one in records] == ids
    for index, record in enumerate(records):
        assert list(record) == ["index", "id", "custom_id", "response", "error"]
        assert (record["response"] is None) == (record["error"] is not None)
        if record["error"] is not None:
            assert list(record["error"]) == ["message", "type", "param", "code"]
            assert record["error"]["message"].startswith(f"line {index + 1}: ")
    assert records[6]["error"]["code"] == "duplicate_id"
    assert records[7]["error"]["param"] == "custom_id"
    assert records[9]["error"]["code"] == "context_length_exceeded"
    assert records[10]["error"]["param"] == "stream"
    err = capsys.readouterr().err
    assert "colour" in err
    assert "3 done, 9 failed" in err

    again = tmp_path / "again.jsonl"
    assert tokenized(f"--input={source}", "--max-num-seqs=2", f"--output={again}") == 1
    assert again.read_bytes() == output.read_bytes()
    assert tokenized("--input-format=openai", f"--input={source}", "--output=-") == 1
    assert capsys.readouterr().out.encode() == output.read_bytes()


@pytest.mark.parametrize("is_openai", [True, False])
def test_a_pipe_is_known_by_its_first_line(tokenized, tmp_path, capsys, is_openai):
    lines = GOOD if is_openai else [{"id": "a", "prompt": "hello", "max_tokens": 4}]
    data = write(tmp_path / "in.jsonl", lines).read_bytes()
    fifo, output = tmp_path / "fifo", tmp_path / "out.jsonl"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(data,))
    writer.start()
    assert tokenized(f"--input={fifo}", f"--output={output}") == 0
    writer.join()
    records = read_records(output)
    assert len(records) == len(lines)
    assert all(("custom_id" in one) == is_openai for one in records)


def test_c45_resumed_after_a_part(tokenized, tmp_path):
    source, output = write(tmp_path / "in.jsonl", TWELVE), tmp_path / "out.jsonl"
    assert tokenized(f"--input={source}", f"--output={output}") == 1
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]) + b'{"index": 3, "id": "ba')
    assert tokenized(f"--input={source}", f"--output={output}", "--resume") == 1
    assert output.read_bytes() == whole
    assert tokenized(f"--input={source}", f"--output={output}", "--resume") == 1  # all done before
    flags = ["--resume", "--input_format=jsonl"]
    assert tokenized(f"--input={source}", f"--output={output}", *flags) == 2  # another meaning
    assert output.read_bytes() == whole


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (line(5, prompt="x"), "custom_id"),
        (line("", prompt="x"), "custom_id"),
        (line("x" * 513, prompt="x"), "custom_id"),
        ({**line("a", prompt="x"), "method": "GET"}, "method"),
        ({**line("a", prompt="x"), "url": "/v1/embeddings"}, "url"),
        ({**line("a", prompt="x"), "url": ["x"]}, "url"),
        ({**line("a"), "body": [1]}, "body"),
        (line("a", prompt="x", model="gpt-4"), "model"),
        (line("a", prompt="x", temperature="hot"), "temperature"),
        (line("a", prompt=["ok", ""]), "prompt[1]"),
        (line("a", prompt=["ok", "x" * 3000]), "prompt"),
        (line("a", CHAT, messages=[]), "messages"),
        (line("a", CHAT, prompt="x"), "messages"),
    ],
)
def test_what_is_wrong_is_named_and_disturbs_no_other(tokenized, tmp_path, wrong, param):
    lines = [GOOD[0], wrong, GOOD[3]]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert tokenized(f"--input={source}", f"--output={output}") == 1
    records = read_records(output)
    assert [one["error"] is None for one in records] == [True, False, True]
    assert records[1]["error"]["param"] == param


def test_flags_are_defaults_and_draws_follow_the_place(tokenized, tmp_path):
    source = write(tmp_path / "in.jsonl", [line("a", prompt=["x", "x"]), line("b", prompt="x")])
    output = tmp_path / "out.jsonl"
    assert tokenized("--max-tokens=2", f"--input={source}", f"--output={output}") == 0
    usages = [one["response"]["body"]["usage"] for one in read_records(output)]
    assert [one["completion_tokens"] for one in usages] == [4, 2]


def test_a_line_whose_model_computes_nan(tokenized, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeLLM, "poison", [41, 42, 43])
    lines = [line("a", prompt=[[7, 8, 9], [41, 42, 43]], max_tokens=20), GOOD[0]]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert tokenized(f"--input={source}", f"--output={output}") == 1
    first, second = read_records(output)
    assert first["error"]["code"] == "non_finite_logits"
    assert second["error"] is None


def test_which_lines_are_of_a_batch_file():
    assert looks_like_openai(json.dumps(GOOD[0]).encode())
    assert looks_like_openai(b'{"url": "/v1/completions", "body": {')
    assert not looks_like_openai(b'{"prompt": "hello", "id": 5}')
    assert not looks_like_openai(json.dumps({"prompt": '"custom_id"'}).encode())


def test_without_the_servers_libraries_it_is_said(tokenized, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jaxserve.server.openai.batch_file", None)
    monkeypatch.delattr(openai, "batch_file", raising=False)
    source = write(tmp_path / "in.jsonl", GOOD)
    assert tokenized(f"--input={source}", "--output=-") == 2
    assert "pip install 'jaxserve[serve]'" in capsys.readouterr().err
    assert tokenized(f"--input={source}", "--output=-", "--input-format=jsonl") == 1
