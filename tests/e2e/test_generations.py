"""What transformers' `generate` says on a random tiny checkpoint under options, and what it draws from:
greedy texts are the same tokens, and each draw is from the same distribution. Made by scripts/make_oracles.
"""

import json
from pathlib import Path

import pytest

from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from tests.checkpoints import make_random_llama
from tests.llms import FEW_BUCKETS, shared_llm

ORACLE = json.loads(
    (Path(__file__).parent.parent / "oracles" / "generations.json").read_text("utf-8")
)
CASES = range(len(ORACLE["cases"]))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_random_llama(tmp_path_factory.mktemp("m"), **ORACLE["checkpoint"])
    return shared_llm(folder, **FEW_BUCKETS)


def check(top: list, num_left: int, step: dict) -> None:
    """The likeliest tokens of one draw, and how many might come at all."""
    top = [(i, logprob) for i, logprob in top if logprob > -9999]
    assert len(top) == min(20, step["num"]) == num_left
    ids, logprobs = zip(*step["top"], strict=True)
    assert tuple(i for i, _ in top[: len(ids)]) == ids
    assert [x for _, x in top[: len(ids)]] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("number", CASES)
def test_tokens_and_what_they_are_taken_from_are_those_of_transformers(llm, number):
    case = ORACLE["cases"][number]
    prompt, ids = case["prompt"], case["token_ids"]
    options = case["options"] | {"logprobs": 20, "processed_logprobs": True, "ignore_eos": True}
    if "temperature" not in options:
        params = SamplingParams(temperature=0, **options)
        (one,) = llm.generate([prompt], params)[0].outputs
        assert one.token_ids == ids
        has_ended = ids[-1] in options.get("stop_token_ids", [])
        assert one.finish_reason == ("stop" if has_ended else "length")
        for top, step in zip(one.top_logprobs, case["steps"], strict=True):
            check(top, min(20, step["num"]), step)
        return
    options["max_tokens"] = 1
    before = [prompt + ids[:place] for place in range(len(ids))]
    outputs = llm.generate(before, SamplingParams(seed=number, **options))
    for output, step in zip(outputs, case["steps"], strict=True):
        (one,) = output.outputs
        check(one.top_logprobs[0], min(20, step["num"]), step)
        if step["num"] <= 8:
            assert one.token_ids[0] in dict(step["top"])


def test_the_cases_have_every_option():
    found = {name for case in ORACLE["cases"] for name in case["options"]}
    assert found == {
        "max_tokens",
        "min_tokens",
        "stop_token_ids",
        "bad_words",
        "allowed_token_ids",
        "repetition_penalty",
        "logit_bias",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
    }
    assert any(len(c["token_ids"]) < c["options"]["max_tokens"] for c in ORACLE["cases"])
