"""The engine end to end on a kernel of another platform, in its interpreter, with that kernel's own
page layout and size: the tokens are those of the portable backends.
"""

import pytest

from jaxserve.stats import EngineStats
from tests.llms import greedy, shared_llm

# Prompts that share a step: one is a chunk while the other decodes, and 12 tokens take two steps.
PROMPTS = [[5, 6, 7], list(range(20, 32))]
OPTIONS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 8, "num_pages": 8}


def serve(**options) -> tuple[list[list[int]], EngineStats]:
    llm = shared_llm(**OPTIONS | options)
    outputs = llm.generate(PROMPTS, greedy(4))
    return [output.outputs[0].token_ids for output in outputs], llm.engine.stats()


@pytest.mark.interpret
def test_the_tpu_kernel_serves_the_engine():
    tokens, stats = serve(attention_backend="tpu", attention_interpret=True, dtype="float32")
    assert tokens == serve(attention_backend="reference", dtype="float32")[0]
    assert (stats.attention_backend, stats.attention_interpret) == ("tpu", True)
    assert stats.page_size == 32


@pytest.mark.interpret
def test_the_tpu_kernel_serves_an_8_bit_cache():
    options = {"kv_cache_dtype": "int8", "dtype": "float32"}
    tokens, stats = serve(attention_backend="tpu", attention_interpret=True, **options)
    assert tokens == serve(attention_backend="xla", **options)[0]
    assert stats.kv_cache_dtype == "int8"
