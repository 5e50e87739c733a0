"""Every family through the engine: greedy tokens and probabilities of transformers' modules, in chunks,
token by token and from cached pages, from one file, from shards, from GGUF and from Orbax."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from jaxserve.llm import LLM
from jaxserve.weights.convert import convert
from jaxserve.weights.loader import load_params, open_checkpoint
from tests.families import CASES, NUM_PROMPT, Case
from tests.gguf_files import can_be_written, write_gguf
from tests.llms import greedy
from tests.numpy_llama import log_softmax

# One of each family, with what sets it apart: windows shorter than the text, layers of two kinds, norms of
# queries and keys, fused projections with rope beyond the original context, multipliers, biases.
SERVED = (
    "llama_yarn",
    "mistral_window",
    "ministral_mixed",
    "qwen2_layer_types",
    "qwen3_window_tied",
    "smollm3",
    "phi3_longrope_beyond",
    "granite_biases",
    "seed_oss_all_biases",
)


class Served(NamedTuple):
    """A case, its checkpoint and an engine that has it."""

    case: Case
    path: Path
    llm: LLM


@pytest.fixture(scope="module", params=SERVED)
def served(request, tmp_path_factory) -> Served:
    case = CASES[request.param]
    path = case.write(tmp_path_factory.mktemp(request.param))
    llm = LLM(
        str(path),
        max_num_seqs=2,
        max_num_batched_tokens=16,  # less than the prompt: it comes in chunks
        max_model_len=64,
        kv_cache_gib=0.001,
        page_size=4,
        token_buckets=(16,),
        row_buckets=(2,),
    )
    return Served(case, path, llm)


def tokens_of(served: Served) -> tuple[list[int], list[float], int]:
    """Greedy tokens after the case's prompt, their log-probabilities, and how many tokens were cached."""
    prompt = served.case.token_ids[:NUM_PROMPT]
    (output,) = served.llm.generate([prompt], greedy(len(served.case.greedy)))
    (choice,) = output.outputs
    return list(choice.token_ids), list(choice.logprobs), output.num_cached_tokens


def test_tokens_and_probabilities_are_those_of_transformers(served):
    case = served.case
    token_ids, _, num_cached = tokens_of(served)
    assert (token_ids, num_cached) == (case.greedy, 0)
    # The control: probabilities see what the tokens may not.
    (score,) = served.llm.score([case.token_ids])
    expected = log_softmax(case.logits.astype(np.float64))[
        np.arange(len(case.token_ids) - 1), case.token_ids[1:]
    ]
    np.testing.assert_allclose(score.logprobs[-len(expected) :], expected, atol=1e-4)


def test_cached_pages_give_the_same(served):
    first, logprobs, _ = tokens_of(served)
    again, cached_logprobs, num_cached = tokens_of(served)
    assert num_cached >= NUM_PROMPT - 4
    assert again == first == served.case.greedy
    np.testing.assert_allclose(cached_logprobs, logprobs, atol=1e-4)


@pytest.mark.parametrize("kind", ["shards", "gguf", "orbax"])
def test_other_files_give_the_same(served, kind, tmp_path):
    """The weights of another file take the place of those that the engine has: nothing is compiled."""
    if kind == "shards":
        path = served.case.write(tmp_path / "shards", max_shard_bytes=30_000)
    elif kind == "orbax":
        path = convert(served.path, tmp_path / "orbax", format="orbax")
    else:
        model = open_checkpoint(served.path)
        if not can_be_written(model.config):
            pytest.skip(f"GGUF has no files of {model.config.architecture}")
        path = write_gguf(tmp_path / "m.gguf", model)
    _, before, _ = tokens_of(served)
    engine = served.llm.engine
    zeros = load_params(open_checkpoint(served.path), np.float32)[0]
    zeros["norm"]["scale"] = np.zeros_like(zeros["norm"]["scale"])
    engine.update_params(zeros)
    assert tokens_of(served)[0] != served.case.greedy  # the control: what is given is what is used
    engine.update_params(load_params(open_checkpoint(path), np.float32)[0])
    token_ids, logprobs, num_cached = tokens_of(served)
    assert (token_ids, num_cached) == (served.case.greedy, 0)
    np.testing.assert_allclose(logprobs, before, atol=1e-5)
