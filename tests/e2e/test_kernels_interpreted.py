"""The engine end to end on a kernel of another platform, in its interpreter, with that kernel's own
page layout and size: the tokens are those of the reference in the same dtype.
"""

import pytest

from jaxserve.stats import EngineStats
from tests.llms import greedy, shared_llm

# Prompts that share a step: one is a chunk while the other decodes, and 12 tokens take two steps.
PROMPTS = [[5, 6, 7], list(range(20, 32))]
OPTIONS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 8, "num_pages": 8}
OPTIONS |= {"token_buckets": (8,), "row_buckets": (2,)}  # interpreters take long to compile


def serve(**options) -> tuple[list[list[int]], EngineStats]:
    llm = shared_llm(**OPTIONS | options)
    outputs = llm.generate(PROMPTS, greedy(4))
    return [output.outputs[0].token_ids for output in outputs], llm.engine.stats()


TPU, GPU = pytest.mark.interpret, pytest.mark.gpu_interpret


@pytest.mark.parametrize(
    ("backend", "dtype", "kv_cache_dtype", "page_size"),
    [
        pytest.param("tpu", "float32", "auto", 32, marks=TPU),
        pytest.param("tpu", "float32", "int8", 32, marks=TPU),
        pytest.param("gpu", "bfloat16", "auto", 64, marks=GPU),
        pytest.param("gpu", "bfloat16", "fp8_e4m3", 64, marks=GPU),
    ],
)
def test_an_interpreted_kernel_serves_the_engine(backend, dtype, kv_cache_dtype, page_size):
    options = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    tokens, stats = serve(attention_backend=backend, attention_interpret=True, **options)
    assert tokens == serve(attention_backend="reference", **options)[0]
    assert (stats.attention_backend, stats.attention_interpret) == (backend, True)
    assert stats.page_size == page_size
    assert stats.kv_cache_dtype == (dtype if kv_cache_dtype == "auto" else kv_cache_dtype)
