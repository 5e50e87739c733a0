"""Qwen2.5-Coder-0.5B-Instruct, of another family than the golden model: what transformers says, we say.

The expected numbers are facts about the model (Apache-2.0, by the Qwen team; from the file that
checkpoints/qwen2.5-coder-0.5b-instruct.toml describes), computed with transformers 5.24 and torch 2.13 in
float32 on CPU.
"""

import json
from pathlib import Path

import pytest
from transformers import Qwen2Tokenizer

from jaxserve.llm import LLM
from tests.llms import greedy

REPOSITORY = Path(__file__).parent.parent.parent
NAME = "qwen2.5-coder-0.5b-instruct"
DIRECTORY = REPOSITORY / "checkpoints" / NAME
GOLDEN = json.loads((REPOSITORY / "tests" / "golden" / f"{NAME}.json").read_text("utf-8"))

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (DIRECTORY / "config.json").is_file(), reason=f"run `jaxserve fetch {NAME}` first"
    ),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        str(DIRECTORY),
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=128,
        kv_cache_gib=0.05,
        token_buckets=(4, 16),
        row_buckets=(4,),
    )


def test_texts_are_the_same_tokens(llm):
    model = json.loads((DIRECTORY / "tokenizer.json").read_text("utf-8"))["model"]
    # transformers' own way to cut text; only the vocabulary and the merges are the file's.
    theirs = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    for case in GOLDEN["texts"]:
        assert llm.tokenizer.encode(case["text"]) == case["token_ids"], case["text"]
        assert theirs.encode(case["text"]) == case["token_ids"], case["text"]
    chat = [{"role": "user", "content": GOLDEN["chat"]["user"]}]
    assert llm.encode_chat(chat) == GOLDEN["chat"]["token_ids"]


def test_greedy_tokens_and_logprobs(llm):
    cases = GOLDEN["texts"]
    prompts = [case["token_ids"] for case in cases]
    outputs = llm.generate(prompts, greedy(len(cases[0]["greedy"])))
    for case, output in zip(cases, outputs, strict=True):
        (choice,) = output.outputs
        assert choice.token_ids == case["greedy"], case["text"]
        assert choice.text == case["says"]
        assert choice.logprobs == pytest.approx(case["logprobs"], abs=1e-3)
