"""A name that no class at the border has is refused with the one that was meant."""

import dataclasses
import re

import pytest

from jaxserve.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxserve.field_names import checks_names, closest
from jaxserve.request import Request
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.structured_outputs import StructuredOutputs


@pytest.mark.parametrize(
    ("cls", "name", "near"),
    [
        (SamplingParams, "temprature", "temperature"),
        (SamplingParams, "max_token", "max_tokens"),
        (SamplingParams, "topP", "top_p"),
        (SamplingParams, "nothing_like_it_at_all", None),
        (BeamParams, "beam_with", "beam_width"),
        (StructuredOutputs, "choices", "choice"),
        (Request, "prompt_ids", "prompt_token_ids"),
        (EngineConfig, "max_model_length", "max_model_len"),
        (CacheConfig, "page_sise", "page_size"),
        (SchedulerConfig, "max_num_seq", "max_num_seqs"),
    ],
)
def test_a_name_that_there_is_not_is_refused_with_what_was_meant(cls, name, near):
    hint = f"did you mean {near!r}? known: " if near else "known: "
    known = [field.name for field in dataclasses.fields(cls)]
    words = f"{cls.__name__} has no field {name!r}; {hint}{', '.join(known)}"
    with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
        cls(**{name: 1})


def test_a_changed_copy_is_held_to_the_same_names():
    with pytest.raises(TypeError, match="did you mean 'top_k'"):
        dataclasses.replace(SamplingParams(), topk=1)  # type: ignore[call-arg]


def test_everything_else_is_left_to_the_class():
    @checks_names
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Two:
        a: int
        b: int = 2

    assert dataclasses.astuple(Two(a=1)) == (1, 2)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'a'"):
        Two(b=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Two(1)  # type: ignore[misc, call-arg]


def test_what_is_nearest():
    assert closest("Max-Tokens", ["max_tokens", "min_tokens"]) == "max_tokens"
    assert closest("x" * 10**6, ["max_tokens"]) is None
