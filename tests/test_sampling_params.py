"""Every field of `SamplingParams` is checked where it is made: what is wrong is named with its value and
the limit, and what is right is kept in one form.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError, shown
from jaxserve.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    BeamParams,
    SamplingParams,
)

NUMBERS = [
    ("temperature", (0, 2.5, 1e30)),
    ("top_k", (-1, 0, 5, 10**6)),
    ("top_p", (0, 1e-9, 1)),
    ("min_p", (0, 0.5, 1)),
    ("presence_penalty", (-2, 0, 2)),
    ("frequency_penalty", (-2, 0, 2)),
    ("repetition_penalty", (0.01, 1, 10)),
    ("seed", (0, -1, 2**63, 2**64 - 1)),
    ("n", (1, 128)),
    ("max_tokens", (0, 1, 10**9)),
    ("min_tokens", (0, 7)),
    ("logprobs", (0, 1, 20)),
    ("prompt_logprobs", (0, 1, 20)),
]
INTEGERS = ("top_k", "seed", "n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
OUTSIDE = {
    "temperature": (-0.1, -1e-300),
    "top_k": (-2, 2**31),
    "top_p": (-0.01, 1.01),
    "min_p": (-0.1, 2),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
    "repetition_penalty": (0, -1, 1e-38, 0.0009, 10.1),
    "seed": (2**64, -(2**63) - 1),
    "n": (0, -1, 129),
    "max_tokens": (-1,),
    "min_tokens": (-1,),
    "logprobs": (-1, 21),
    "prompt_logprobs": (-1, 21),
}
FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "processed_logprobs",
    "echo",
)
LISTS = [
    ("stop", [""]),
    ("stop", ""),
    ("stop", [1]),
    ("stop", 7),
    ("stop", 0),
    ("stop", False),
    ("stop", {}),
    ("stop", ["\ud800"]),
    ("stop", ["x"] * 65),
    ("stop", ["x" * 1025]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", {1: 2}),
    ("stop_token_ids", 3),
    ("stop_token_ids", [1] * 1025),
    ("allowed_token_ids", []),
    ("allowed_token_ids", 5),
    ("allowed_token_ids", "5"),
    ("allowed_token_ids", [1, -1]),
    ("allowed_token_ids", [math.nan]),
    ("allowed_token_ids", [None]),
    ("allowed_token_ids", np.zeros((2, 2), np.int32)),
    ("allowed_token_ids", np.array(3)),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", [[]]),
    ("bad_words", [["a"]]),
    ("bad_words", [1, 2]),
    ("bad_words", [[1] * 2049]),
    ("bad_words", ["x"] * 1025),
    ("bad_words", ["x" * 257]),
    ("bad_words", {"a": 1}),
    ("bad_words", [None]),
    ("logit_bias", [1, 2]),
    ("logit_bias", "1"),
    ("logit_bias", 5),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {"-1": 1.0}),
    ("logit_bias", {"1.0": 1.0}),
    ("logit_bias", {"٣": 1.0}),
    ("logit_bias", {"1" * 5000: 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {1.5: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: "5"}),
    ("logit_bias", {1: True}),
    ("logit_bias", {1: None}),
    ("logit_bias", {1: 100.1}),
    ("logit_bias", {1: -100.1}),
    ("logit_bias", {"5": 1, 5: 2}),
]


def refused(**fields):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    error = caught.value
    (name,) = fields.keys() - {"max_tokens"} if len(fields) > 1 else fields
    assert error.param == name
    assert name in error.message
    assert error.to_dict()["type"] == "invalid_request_error"
    return error.message


@pytest.mark.parametrize(("name", "values"), NUMBERS)
def test_a_number_in_its_range_is_taken_and_one_outside_is_named(name, values):
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value
        of_numpy = np.float64(value) if type(value) is float else value
        assert type(getattr(SamplingParams(**{name: of_numpy}), name)) is type(value)
    wrong = [*OUTSIDE[name], math.nan, math.inf, -math.inf, "1", [1], True, 1j]
    wrong += [] if name in ("max_tokens", "min_tokens") else [10**400]
    wrong += [0.5, 1.0] if name in INTEGERS else []
    for value in wrong:
        if name == "logprobs" and value is True:
            continue
        message = refused(**{name: value})
        assert message.startswith(f"{name} must be ")
        assert message.endswith(f"got {shown(value)}")


def test_an_unprintable_number_is_refused_too():
    assert "an integer of 16610 bits" in refused(top_p=10**5000)


@pytest.mark.parametrize("name", FLAGS)
def test_a_switch_is_true_or_false(name):
    for value in (1, 0, "no", None, []):
        assert refused(**{name: value}) == f"{name} must be a boolean, got {value!r}"


@pytest.mark.parametrize(("name", "value"), LISTS)
def test_a_bad_list_is_named(name, value):
    refused(**{name: value})


@pytest.mark.parametrize(
    ("name", "most"),
    [("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS), ("bad_words", MAX_BAD_WORDS)],
)
def test_a_huge_list_is_refused_without_reading_it(name, most):
    endless = itertools.repeat(5)
    assert refused(**{name: endless}) == f"{name} must have {most} elements or fewer, got more"
    assert refused(**{name: range(10**12)}).endswith(f"{most} elements or fewer, got 1000000000000")


def test_bad_words_are_bounded_in_all():
    """Each of their ids is looked at in every step."""
    word = [5] * 2048
    assert len(SamplingParams(bad_words=[word] * 64).bad_words) == 64
    assert refused(bad_words=[word] * 64 + [[5]]).startswith(
        "bad_words must be lists of 131072 token"
    )
    assert refused(bad_words=["a" * 256] * 171).endswith("got 131841")


def test_a_bias_for_too_many_tokens_is_refused():
    most = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
    assert len(SamplingParams(logit_bias=most).bias_pairs) == MAX_LOGIT_BIAS
    message = refused(logit_bias=most | {MAX_LOGIT_BIAS: 1.0})
    assert message == "logit_bias must have 1024 elements or fewer, got 1025"


def test_lists_are_kept_in_one_form():
    params = SamplingParams(
        logit_bias={"7": -100, 3: np.float32(0.5)},
        bad_words=["a", np.array([1, 2]), [3]],
        allowed_token_ids=(5, 5, np.int64(2)),
        stop_token_ids=np.array([9, 8]),
        stop="x",
    )
    assert params.logit_bias == ((3, 0.5), (7, -100.0))
    assert params.bad_words == ("a", (1, 2), (3,))
    assert params.allowed_token_ids == (2, 5)
    assert params.stop_token_ids == (9, 8)
    assert params.stop == ("x",)
    assert dataclasses.replace(params, n=2) == dataclasses.replace(params, n=2)
    again = dataclasses.replace(params, seed=1)
    assert dataclasses.replace(again, seed=None) == params


def test_none_is_the_default_of_a_list():
    names = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias")
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()
    assert SamplingParams(logit_bias={}) == SamplingParams()


def test_c05_min_tokens_are_at_most_max_tokens():
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    assert SamplingParams(min_tokens=3).max_tokens is None
    message = refused(min_tokens=4, max_tokens=3)
    assert message == "min_tokens must be at most max_tokens (3), got 4"


@pytest.mark.parametrize(
    ("logprobs", "wants", "num_top"),
    [
        (None, False, 0),
        (False, False, 0),
        (True, True, 0),
        (0, True, 0),
        (1, True, 1),
        (20, True, 20),
    ],
)
def test_what_logprobs_ask_for(logprobs, wants, num_top):
    params = SamplingParams(logprobs=logprobs)
    assert (params.wants_logprobs, params.num_top_logprobs) == (wants, num_top)


def test_penalties_are_wanted_only_where_one_is_set():
    assert not SamplingParams().wants_penalties
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{name: 1.5}).wants_penalties


def test_beam_params_check_what_they_share():
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        BeamParams(beam_width=2, stop_token_ids=[-1])
