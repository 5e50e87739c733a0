import json

from jaxserve.server.openai.sse import DONE, ChunkWriter, encode, event
from tests.server.replies import events_in


def test_nothing_in_a_text_ends_a_line():
    text = "a\nb\r\nc\u2028d\u2029e\x85f\x0bg\x0ch\x1ci\x1dj\x1ek 🙂"
    data = event({"text": text})
    assert len(data.decode().splitlines()) == 2
    assert events_in(data + DONE) == [{"text": text}]


def test_no_number_that_json_has_not():
    assert encode([float("nan"), float("inf"), -0.5]) == b"[null,null,-0.5]"


def test_chunks_are_the_objects_they_stand_for():
    head = {"id": "x", "object": "o"}
    plain = ChunkWriter(head, says_usage=False)
    assert events_in(plain.chunk({"index": 0}) + DONE) == [{**head, "choices": [{"index": 0}]}]
    usage = {"total_tokens": 3}
    more = {"prompt_token_ids": [1, 2]}
    told = ChunkWriter(head, says_usage=True)
    data = told.chunk({"index": 0}) + told.chunk({"index": 1}, usage) + told.usage(usage)
    data += told.chunk({"index": 2}, None, more) + told.chunk({"index": 3}, usage, more)
    assert events_in(data + plain.chunk({}, None, more) + DONE) == [
        {**head, "choices": [{"index": 0}], "usage": None},
        {**head, "choices": [{"index": 1}], "usage": usage},
        {**head, "choices": [], "usage": usage},
        {**head, "choices": [{"index": 2}], **more, "usage": None},
        {**head, "choices": [{"index": 3}], **more, "usage": usage},
        {**head, "choices": [{}], **more},
    ]
    assert json.loads(told.usage(usage).removeprefix(b"data: "))
