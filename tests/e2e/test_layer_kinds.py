"""Models whose layers differ through the whole engine: chunks, single tokens, prefix hits and preemption give
the greedy tokens of transformers, with one program for each sort of layers.
"""

import pytest

from jaxserve.device import choices
from jaxserve.llm import LLM
from tests.families import CASES, NUM_PROMPT
from tests.llms import greedy

SORTS = {  # case -> programs of layers, where each takes one layer
    "qwen2_window": 2,
    "ministral_mixed": 2,
    "smollm3_window": 2,
    "qwen3": 1,
    "phi3_window": 1,
}


@pytest.fixture(scope="module", params=SORTS)
def served(request, tmp_path_factory) -> tuple[str, LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "MAX_CPU_LAYERS_PER_PROGRAM", 1)
        llm = LLM(
            str(CASES[request.param].write(tmp_path_factory.mktemp("m"))),
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=64,
            token_buckets=(4, 16),
            row_buckets=(4,),
            num_pages=24,
            page_size=4,
        )
    return request.param, llm


def test_greedy_tokens_are_those_of_transformers(served):
    name, llm = served
    case = CASES[name]
    prompt, params = case.token_ids[:NUM_PROMPT], greedy(len(case.greedy))
    for num_cached in (0, NUM_PROMPT - 1):  # then with the pages of the first
        (output,) = llm.generate([prompt], params)
        assert output.outputs[0].token_ids == case.greedy
        assert output.num_cached_tokens == num_cached
    # More than the pool holds at once: some are preempted and go on.
    before = llm.engine.stats().num_preemptions
    prompts = [[*prompt[i:], *prompt[:i]] for i in range(4)]
    together = llm.generate(prompts, params)
    assert llm.engine.stats().num_preemptions > before
    assert together[0].outputs[0].token_ids == case.greedy
    for one, output in zip(prompts[1:], together[1:], strict=True):
        (alone,) = llm.generate([one], params)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_layers_of_one_sort_share_a_program(served):
    name, llm = served
    shapes = llm.engine.executor._shapes  # type: ignore[attr-defined]
    assert len(set(shapes.run_programs)) == SORTS[name]
    by_kind = dict(zip(shapes.model.config.layer_kinds, shapes.run_programs, strict=True))
    assert len(by_kind) == SORTS[name]
