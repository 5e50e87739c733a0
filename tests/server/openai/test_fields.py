import logging

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.openai.fields import (
    MAX_UNKNOWN_NAMES,
    SAMPLING_FIELDS,
    Field,
    UnknownFields,
    ignored_fields,
    make_sampling_params,
    read_fields,
    refused_field,
    table,
)

KNOWN = table(
    Field(name="own", schema={"type": "boolean"}, doc="a switch"),
    Field(name="any", schema={}, doc="whatever"),
    *ignored_fields("user"),
    refused_field("old", "it is gone"),
    *SAMPLING_FIELDS,
)


def test_what_says_something_is_read():
    body = {"own": True, "any": [1], "user": 5, "old": None, "n": None, "temperature": "hot"}
    assert read_fields(body, KNOWN, UnknownFields()) == {
        "own": True,
        "any": [1],
        "temperature": "hot",  # `SamplingParams` says what is wrong with it
    }


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ({"n": 2.0, "seed": -7.0, "top_k": 1e3}, {"n": 2, "seed": -7, "top_k": 1000}),
        ({"stop_token_ids": [1.0, 2]}, {"stop_token_ids": [1, 2]}),
        ({"bad_words": ["a", [3.0, 4]]}, {"bad_words": ["a", [3, 4]]}),
        ({"n": 2.5, "temperature": 1.0}, {"n": 2.5, "temperature": 1.0}),
        (
            {"n": float("inf"), "logit_bias": {"1": 2.0}},
            {"n": float("inf"), "logit_bias": {"1": 2.0}},
        ),
    ],
)
def test_a_number_without_fraction_is_an_integer_where_one_is_wanted(body, read):
    found = read_fields(body, KNOWN, UnknownFields())
    assert (found, repr(found)) == (read, repr(read))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"own": 1}, "own must be a boolean, got 1"),
        ({"old": False}, "old cannot be given: it is gone"),
    ],
)
def test_what_is_refused(body, message):
    with pytest.raises(InvalidRequestError, match=message):
        read_fields(body, KNOWN, UnknownFields())


def test_unknown_names_are_said_once_each_and_their_memory_is_bounded(caplog):
    unknown = UnknownFields()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            read_fields({"temprature": 1, "x\n": 2}, KNOWN, unknown)
        assert len(caplog.records) == 2
        assert "did you mean 'temperature'" in caplog.text
        assert "'x\\n'" in caplog.text  # no line break of a client's in the log
        for i in range(MAX_UNKNOWN_NAMES + 10):
            unknown.warn(f"name{i}", {})
    assert len(caplog.records) == MAX_UNKNOWN_NAMES


def test_sampling_params_take_what_is_given_and_the_default_for_the_rest():
    default = SamplingParams(temperature=0.5, top_k=3)
    made = make_sampling_params({"top_k": 4, "own": True}, default, n=2)
    assert made == SamplingParams(temperature=0.5, top_k=4, n=2)


def test_every_field_of_sampling_params_is_in_the_table_or_read_by_an_endpoint():
    own = {"logprobs", "echo"}
    assert {field.name for field in SAMPLING_FIELDS} | own == set(
        SamplingParams.__dataclass_fields__
    )


def test_names_without_meaning_are_not_kept_whole(caplog):
    unknown = UnknownFields()
    with caplog.at_level(logging.WARNING, "jaxserve.server"):
        for number in range(3):
            unknown.warn("x" * 1_000_000 + str(number), KNOWN)
    assert len(caplog.records) == 1
    assert sum(map(len, unknown._said)) < 100
