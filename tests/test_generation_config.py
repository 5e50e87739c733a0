"""What a checkpoint recommends becomes the defaults, and only that."""

import dataclasses
import shutil

import pytest

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.generation_config import sampling_defaults
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from jaxserve.weights.hf_directory import write_json
from tests.llms import TINY

RECOMMENDED = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": None,
    "repetition_penalty": 1.1,
    "max_new_tokens": 5,
    "num_beams": 4,
    "eos_token_id": 2,
}
EXPECTED = {
    "temperature": 0.6,
    "top_k": 50,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "max_tokens": 5,
}
SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64, "num_pages": 20}
SMALL |= {"token_buckets": (8,), "row_buckets": (2,)}


def test_fields_that_a_checkpoint_sets():
    assert sampling_defaults(RECOMMENDED) == EXPECTED
    assert sampling_defaults(RECOMMENDED, "none") == {}
    assert sampling_defaults({}) == {}


def test_another_mode_is_refused():
    with pytest.raises(ConfigError, match="generation_config must be one of auto, none, got 'x'"):
        sampling_defaults({}, "x")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", "hot", "temperature must be a finite number, got 'hot'"),
        ("top_p", 7, "top_p must be in"),
        ("top_k", True, "top_k must be an integer"),
        ("max_new_tokens", -1, "max_tokens must be"),
        ("repetition_penalty", 0, "repetition_penalty must be"),
    ],
)
def test_a_value_that_no_request_could_have_is_the_checkpoint_s_error(name, value, words):
    with pytest.raises(CheckpointError, match=f"generation_config.json: {words}"):
        sampling_defaults({name: value})
    assert sampling_defaults({name: value}, "none") == {}


@pytest.fixture(scope="module")
def recommending(tmp_path_factory):
    path = tmp_path_factory.mktemp("recommending") / "model"
    shutil.copytree(TINY, path)
    write_json(path / "generation_config.json", RECOMMENDED)
    return path


def test_an_llm_decodes_without_params_as_its_checkpoint_recommends(recommending):
    llm = LLM(str(recommending), **SMALL)
    assert llm.default_sampling_params == SamplingParams(**EXPECTED)
    prompts = [[5, 6, 7]] * 2
    (first, second) = (out.outputs[0] for out in llm.generate(prompts))
    assert (len(first.token_ids), first.finish_reason) == (5, "length")
    assert len(second.token_ids) == 5
    assert sum(len(part.outputs[0].token_ids) for part in llm.stream([5, 6, 7])) == 5
    # Params that are given know of no checkpoint.
    own = SamplingParams(ignore_eos=True, temperature=0)
    assert len(llm.generate([[5, 6, 7]], own)[0].outputs[0].token_ids) == 61
    changed = dataclasses.replace(llm.default_sampling_params, max_tokens=2, ignore_eos=True)
    assert len(llm.generate([[5, 6, 7]], changed)[0].outputs[0].token_ids) == 2


def test_an_llm_can_be_told_to_read_nothing_of_it(recommending):
    llm = LLM(str(recommending), generation_config="none", **SMALL)
    assert llm.default_sampling_params == SamplingParams()
    with pytest.raises(ConfigError, match="generation_config"):
        LLM(str(recommending), generation_config="some", **SMALL)
