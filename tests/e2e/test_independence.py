"""Greedy tokens equal a plain full-context forward, whatever the chunking, page size, bucket,
neighbours or preemption.
"""

import functools
import random

import pytest

from jaxserve.request import SamplingParams
from tests import numpy_llama
from tests.llms import TINY, greedy, shared_llm, stream_all

ARMS = {
    "plain": {},
    "small_pages": {"page_size": 4},
    "one_token_steps": {"max_num_batched_tokens": 1},
    "odd_budget": {"max_num_batched_tokens": 7, "page_size": 8},
    "one_at_a_time": {"max_num_seqs": 1},
    "static": {"scheduling": "static"},
    "reference": {"attention_backend": "reference", "page_size": 16},
}
NUM_TOKENS = 8


@functools.cache
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [
        [rng.randrange(512) for _ in range(n)] for n in (1, 2, 3, 4, 5, 8, 13, 17, 33, 64, 65, 90)
    ]


@functools.cache
def oracle() -> list[tuple[list[int], list[float]]]:
    return [numpy_llama.greedy(TINY, p, NUM_TOKENS) for p in prompts()]


@pytest.mark.parametrize("arm", ARMS)
def test_c11_greedy_equals_the_full_context_forward(arm):
    llm = shared_llm(**ARMS[arm])
    together = llm.generate(prompts(), greedy(NUM_TOKENS))
    for prompt, (ids, logprobs), output in zip(prompts(), oracle(), together, strict=True):
        one = output.outputs[0]
        assert one.token_ids == ids, f"prompt of {len(prompt)}"
        assert one.logprobs == pytest.approx(logprobs, abs=1e-4)
    llm.engine.check_invariants()


def test_c11_neighbours_do_not_matter():
    llm = shared_llm(page_size=4)
    rng = random.Random(5)
    chosen = prompts()
    for _ in range(6):
        picks = [rng.randrange(len(chosen)) for _ in range(rng.randint(2, 6))]
        outputs = llm.generate([chosen[i] for i in picks], greedy(NUM_TOKENS))
        for i, output in zip(picks, outputs, strict=True):
            assert output.outputs[0].token_ids == oracle()[i][0]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}])
def test_c12_preemption_is_invisible(sampling):
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=True, **sampling)
    four = [[10 * i + j for j in range(8)] for i in range(4)]
    tight = shared_llm(page_size=4, num_pages=11)
    before = tight.engine.stats().num_preemptions
    for i, prompt in enumerate(four):
        tight.add(f"p{i}", prompt, params)
    parts: dict[str, list] = {}
    while tight.engine.has_work():
        for output in tight.step():
            parts.setdefault(output.request_id, []).append(output.outputs[0])
        tight.engine.check_invariants()
    assert tight.engine.stats().num_preemptions - before >= 2
    roomy = shared_llm(page_size=4)
    for i, expected in enumerate(roomy.generate(four, params)):
        want, got = expected.outputs[0], parts[f"p{i}"]
        assert [t for part in got for t in part.token_ids] == want.token_ids
        assert "".join(part.text for part in got) == want.text
        assert [x for part in got for x in part.logprobs] == pytest.approx(want.logprobs, abs=1e-4)
        assert got[-1].finish_reason == want.finish_reason == "length"


def test_c17_seeded_draws_do_not_depend_on_the_batch():
    llm = shared_llm()
    prompt = prompts()[6]
    seeded = SamplingParams(max_tokens=16, temperature=0.8, seed=42, ignore_eos=True)
    free = SamplingParams(max_tokens=16, temperature=0.8, ignore_eos=True)
    other = SamplingParams(max_tokens=16, temperature=0.8, seed=7, ignore_eos=True)

    def drawn(batch, params, which):
        return llm.generate(batch, params)[which].outputs[0].token_ids

    solo = drawn([prompt], seeded, 0)
    assert drawn([prompt, prompts()[3]], [seeded, free], 0) == solo
    assert drawn([prompts()[4], prompt], [other, seeded], 1) == solo
    assert drawn([prompts()[i] for i in (1, 2, 3)] + [prompt], [free] * 3 + [seeded], 3) == solo
    assert drawn([prompt, prompt], seeded, 1) == solo
    stream = stream_all(llm, prompt, seeded)
    assert [t for part in stream for t in part.outputs[0].token_ids] == solo
    small = shared_llm(page_size=4, max_num_batched_tokens=7)
    assert small.generate([prompt], seeded)[0].outputs[0].token_ids == solo
    llm.add("early", prompts()[8], free)
    for _ in range(3):
        llm.step()
    assert drawn([prompt], seeded, 0) == solo
    while llm.has_work():
        assert {output.request_id for output in llm.step()} <= {"early"}


def test_c17_seed_edges_and_unseeded_variety():
    llm = shared_llm()
    hot = {"max_tokens": 8, "temperature": 2.0, "ignore_eos": True}

    def drawn(seed):
        return llm.generate([[1, 2, 3]], SamplingParams(seed=seed, **hot))[0].outputs[0].token_ids

    assert drawn(0) == drawn(0)
    assert drawn(-1) == drawn(2**64 - 1)
    assert len({tuple(drawn(s)) for s in (0, 1, -1, 2**63, 2**32)}) == 5
    unseeded = llm.generate([[1, 2, 3]] * 8, SamplingParams(**hot))
    assert len({tuple(o.outputs[0].token_ids) for o in unseeded}) > 1
