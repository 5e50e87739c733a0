"""What the cache, copies, swaps and policies do must not show in any output: tokens and logprobs are
those of an engine that has none of them.
"""

import random

import pytest

from jaxserve.request import SamplingParams
from jaxserve.schedule.preemption import PreemptionMode
from tests.llms import FEW_BUCKETS, greedy, shared_llm

# The same shapes throughout, so the same compiled programs; page 4 makes things happen early.
CACHED = {"page_size": 4} | FEW_BUCKETS
PLAIN = CACHED | {"enable_prefix_caching": False}
PRESSED = CACHED | {"num_pages": 28, "host_kv_gib": 0.001}


def assert_same(found, expected):
    for got, want in zip(found, expected, strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert got.outputs[0].logprobs == pytest.approx(want.outputs[0].logprobs, abs=1e-5)


def prompt_of(length: int) -> list[int]:
    return [(17 * length + 5 * j) % 512 for j in range(length)]


@pytest.mark.parametrize("length", range(1, 14))
def test_c09_a_full_hit_still_computes_a_token(length):
    prompt = prompt_of(length)
    (expected,) = shared_llm(**PLAIN).generate([prompt], greedy(6))
    llm = shared_llm(**CACHED)
    llm.engine.scheduler.kv.clear_cache()
    for times in (1, 1, 1, 5):
        outputs = llm.generate([prompt] * times, greedy(6))
        assert_same(outputs, [expected] * times)
        assert all(output.num_cached_tokens <= length - 1 for output in outputs)
    full_pages = 4 * (length // 4)
    assert outputs[-1].num_cached_tokens == min(full_pages, length - 1)
    llm.engine.check_invariants()


def test_a_second_turn_hits_the_first_answer():
    llm, plain = shared_llm(**CACHED), shared_llm(**PLAIN)
    llm.engine.scheduler.kv.clear_cache()
    first = prompt_of(10)
    answer = llm.generate([first], greedy(14))[0].outputs[0].token_ids
    second = [*first, *answer, 7, 8, 9]
    (output,) = llm.generate([second], greedy(8))
    assert output.num_cached_tokens == 20  # of 24 known tokens the last sampled one has no KV
    assert_same([output], plain.generate([second], greedy(8)))


def test_sixteen_requests_with_one_prefix_compute_it_once():
    llm, plain = shared_llm(**CACHED), shared_llm(**PLAIN)
    llm.engine.scheduler.kv.clear_cache()
    prompts = [[*range(60), 100 + i, 3 * i] for i in range(16)]
    outputs = llm.generate(prompts, greedy(4))
    assert [output.num_cached_tokens for output in outputs] == [0, *[60] * 15]
    assert_same(outputs, plain.generate(prompts, greedy(4)))


def test_a_salt_keeps_others_out():
    llm = shared_llm(**CACHED)
    llm.engine.scheduler.kv.clear_cache()
    prompt = prompt_of(30)
    found = []
    for number, salt in enumerate([None, "a", "a", "b", None]):
        llm.add(f"salt-{number}", prompt, greedy(2), cache_salt=salt)
        while llm.has_work():
            found += [o.num_cached_tokens for o in llm.step() if o.finished]
    assert found == [0, 0, 28, 0, 28]


def pressed_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Eight requests, some with a common beginning, that need 88 pages of 4 together."""
    rng = random.Random(1)
    prompts = [[*range(8 * (i % 2)), *(rng.randrange(512) for _ in range(20))] for i in range(8)]
    greedy_ones = [greedy(24)] * 4
    seeded = [
        SamplingParams(max_tokens=24, temperature=1, seed=i, ignore_eos=True, logprobs=True)
        for i in range(4)
    ]
    return prompts, [one for pair in zip(greedy_ones, seeded, strict=True) for one in pair]


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_c12_little_memory_changes_nothing(mode):
    prompts, params = pressed_requests()
    llm = shared_llm(**PRESSED)
    scheduler, costs = llm.engine.scheduler, llm.engine.executor.costs
    scheduler.kv.clear_cache()
    scheduler.preemption = PreemptionMode(mode, costs)
    swaps, all_before = scheduler.counters.num_swaps, scheduler.counters.num_preemptions
    outputs = llm.generate(prompts, params)
    assert scheduler.counters.num_preemptions > all_before
    assert (scheduler.counters.num_swaps > swaps) == (mode == "swap") or mode == "auto"
    assert_same(outputs, shared_llm(**PLAIN).generate(prompts, params))
    llm.engine.check_invariants()
    assert scheduler.kv.host.num_free == scheduler.kv.host.num_pages


@pytest.mark.parametrize("admission", ["lpm", "short_first"])
def test_policies_change_the_order_alone(admission):
    prompts, params = pressed_requests()
    llm = shared_llm(**PRESSED, admission=admission)
    assert_same(llm.generate(prompts, params), shared_llm(**PLAIN).generate(prompts, params))
    llm.engine.check_invariants()
