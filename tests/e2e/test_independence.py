"""Greedy tokens equal a plain full-context forward, whatever the chunking, page size, bucket,
neighbours or preemption.
"""

import functools
import random

import pytest

from jaxserve.device.compile_counter import CompileCounter
from jaxserve.request import SamplingParams
from jaxserve.sampling_params import BeamParams
from tests import numpy_llama
from tests.e2e.test_memory import CACHED
from tests.llms import TINY, WHOLE_LADDERS, greedy, shared_llm, stream_all

ODD_BUDGET = {"max_num_batched_tokens": 7, "token_buckets": (3, 7), "row_buckets": (4,)}
ARMS = {
    "whole_ladders": WHOLE_LADDERS,
    "small_pages": CACHED,
    "one_token_steps": {"max_num_batched_tokens": 1},
    "odd_budget": ODD_BUDGET | {"page_size": 8},
    "one_at_a_time": {"max_num_seqs": 1, "token_buckets": (4, 32)},
    "static": {"scheduling": "static"},
    "reference": {"attention_backend": "reference", "page_size": 16},
    "xla": {"attention_backend": "xla"},
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


def test_c46_every_way_of_stepping_gives_the_same_and_compiles_nothing(monkeypatch):
    """One step behind, one at a time, several decode steps in one; choices, draws and chunks."""
    llm = shared_llm(**WHOLE_LADDERS)
    counter = CompileCounter()
    params = [
        greedy(NUM_TOKENS),
        SamplingParams(max_tokens=30, n=2, temperature=1.0, seed=4, ignore_eos=True),
        greedy(25, ignore_eos=False, stop_token_ids=list(range(0, 512, 9))),
    ]
    found = []
    for is_async, num_steps in ((True, 1), (False, 1), (True, 4), (False, 7)):
        monkeypatch.setattr(llm.engine._loop, "async_scheduling", is_async)
        monkeypatch.setattr(llm.engine.scheduler, "num_decode_steps", num_steps)
        outputs = [output for one in params for output in llm.generate(prompts(), one)]
        found.append([(c.token_ids, c.finish_reason) for o in outputs for c in o.outputs])
        llm.engine.check_invariants()
    assert all(one == found[0] for one in found)
    assert counter.count == 0


def test_c46_any_mix_of_requests_compiles_nothing():
    llm = shared_llm()
    counter = CompileCounter()
    rng = random.Random(9)
    for number, length in enumerate([1, 2, 3, 31, 32, 33, 64, 119]):
        fields = [
            {"temperature": 0},
            {"top_p": 0.8, "seed": number},
            {"top_k": 5, "min_p": 0.1, "seed": number},
            {"n": 3, "seed": number},
        ][number % 4]
        params = SamplingParams(max_tokens=8, **({"temperature": 1.0} | fields))
        batch = [[rng.randrange(512) for _ in range(length)] for _ in range(number % 5 + 1)]
        llm.generate(batch, params)
    llm.beam_search([[1, 2, 3]], BeamParams(beam_width=3, max_tokens=5))
    assert counter.count == 0


def test_c11_neighbours_do_not_matter():
    llm = shared_llm(**CACHED)
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
    tight = shared_llm(num_pages=11, **CACHED)
    before = tight.engine.stats().num_preemptions
    for i, prompt in enumerate(four):
        tight.add(f"p{i}", prompt, params)
    parts: dict[str, list] = {}
    while tight.engine.has_work():
        for output in tight.step():
            parts.setdefault(output.request_id, []).append(output.outputs[0])
        tight.engine.check_invariants()
    assert tight.engine.stats().num_preemptions - before >= 2
    roomy = shared_llm(**CACHED)
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
    small = shared_llm(page_size=4, **ODD_BUDGET)
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
