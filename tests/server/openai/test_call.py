import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.request import CompletionOutput, RequestOutput
from jaxserve.server.openai.call import StreamOptions, failure_of
from jaxserve.server.openai.usage import UsageCounter


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, (False, False, False)),
        ({"stream": False}, (False, False, False)),
        ({"stream": True}, (True, False, False)),
        ({"stream": True, "stream_options": {}}, (True, False, False)),
        ({"stream": True, "stream_options": {"include_usage": None}}, (True, False, False)),
        ({"stream": True, "stream_options": {"include_usage": True}}, (True, True, False)),
        (
            {
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            (True, True, True),
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            (True, False, False),
        ),
    ],
)
def test_stream_options(fields, wanted):
    found = StreamOptions.from_fields(fields)
    assert (found.stream, found.include_usage, found.continuous_usage_stats) == wanted


@pytest.mark.parametrize("stream", [None, False])
def test_stream_options_need_a_stream(stream):
    with pytest.raises(InvalidRequestError, match="stream: true"):
        StreamOptions.from_fields(
            {"stream_options": {}} | ({} if stream is None else {"stream": stream})
        )


def _output(*pieces, cached=0):
    outputs = [
        CompletionOutput(i, "", [0] * count, None, reason, why)
        for i, (count, reason, why) in enumerate(pieces)
    ]
    return RequestOutput("x", outputs, 7, cached, False)


def test_what_is_no_answer():
    assert failure_of(_output((1, "stop", None), (1, None, None))) is None
    failed = failure_of(_output((1, "stop", None), (2, "error", "non_finite_logits")))
    assert failed.code == "non_finite_logits"
    assert "choice 1" in failed.message
    assert failure_of(_output((0, "abort", None))).code == "aborted"
    dead_end = failure_of(_output((0, "error", "structured_outputs")))
    assert isinstance(dead_end, InvalidRequestError)  # a 400: what was asked for leads there
    assert (dead_end.param, dead_end.code) == ("structured_outputs", "constraint_failed")
    costly = failure_of(_output((0, "error", "structured_outputs_too_costly")))
    assert isinstance(costly, InvalidRequestError)
    assert (costly.param, costly.code) == ("structured_outputs", "structured_outputs_too_costly")
    assert "too large" in costly.message


def test_usage_counts_prompts_once_and_all_choices():
    usage = UsageCounter(shows_cached=True)
    for _ in range(3):
        usage.add(0, _output((2, None, None), (1, None, None), cached=4))
    usage.add(1, _output((5, "stop", None)))
    assert usage.body() == {
        "prompt_tokens": 14,
        "completion_tokens": 14,
        "total_tokens": 28,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert "prompt_tokens_details" not in UsageCounter(shows_cached=False).body()
