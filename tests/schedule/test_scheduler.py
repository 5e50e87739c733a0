"""The scheduler through an engine over a fake device: whatever is packed, preempted or aborted,
outputs are the same.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.schedule.buckets import Bucket, Buckets, ladder
from tests.fakes import drain, expected_tokens, make_engine
from tests.schedule.runs import request, token_ids

requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=10)
POLICIES = {
    "admission": st.sampled_from(["fcfs", "priority", "lpm", "short_first"]),
    "preemption_mode": st.sampled_from(["auto", "recompute", "swap"]),
    "enable_prefix_caching": st.booleans(),
    "eviction": st.sampled_from(["lru", "lfu", "fifo", "priority"]),
    "scheduling": st.sampled_from(["continuous", "continuous", "static"]),
    "max_num_partial_prefills": st.sampled_from([None, 1, 3]),
    "long_prefill_token_threshold": st.sampled_from([None, 1, 5]),
    "target_itl_s": st.sampled_from([None, None, 1e-9]),
}


@settings(max_examples=100, deadline=None)
@given(
    sizes=requests,
    page_size=st.sampled_from([4, 8, 16]),
    spare_pages=st.integers(0, 20),
    num_host_pages=st.sampled_from([1, 5, 40]),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 40),
    num_common_tokens=st.sampled_from([0, 3, 8, 30]),
    arrivals=st.lists(st.integers(0, 3), min_size=10, max_size=10),
    options=st.fixed_dictionaries(POLICIES),
)
def test_outputs_do_not_depend_on_scheduling(
    sizes,
    page_size,
    spare_pages,
    num_host_pages,
    max_num_seqs,
    budget,
    num_common_tokens,
    arrivals,
    options,
):
    largest = max(-(-(prompt + out) // page_size) for prompt, out in sizes)
    engine = make_engine(
        num_pages=1 + largest + spare_pages,
        page_size=page_size,
        num_host_pages=num_host_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        **options,
    )
    common = [(11 * j) % 1000 for j in range(num_common_tokens)]
    prompts = [
        (common + [(7 * i + j) % 1000 for j in range(n)])[:n] for i, (n, _) in enumerate(sizes)
    ]
    parts: dict[str, list] = {}
    for i, (prompt, (_, out)) in enumerate(zip(prompts, sizes, strict=True)):
        engine.add(request(str(i), prompt, out, priority=i % 3))
        engine.check_invariants()
        for _ in range(arrivals[i]):
            for output in engine.step():
                parts.setdefault(output.request_id, []).append(output)
            engine.check_invariants()
    for name, more in drain(engine).items():
        parts.setdefault(name, []).extend(more)
    for i, (prompt, (_, out)) in enumerate(zip(prompts, sizes, strict=True)):
        assert token_ids(parts[str(i)]) == expected_tokens(prompt, out)
        assert parts[str(i)][-1].outputs[0].finish_reason == "length"
        assert parts[str(i)][-1].num_cached_tokens < len(prompt)
    kv = engine.scheduler.kv
    assert kv.num_available_pages == kv.pool.num_usable
    assert kv.host.num_free == num_host_pages
    kv.clear_cache()
    assert kv.pool.num_free == kv.pool.num_usable


@settings(max_examples=60, deadline=None)
@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 20), st.integers(1, 12)),
            st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
            st.tuples(st.just("step"), st.just(0), st.just(0)),
        ),
        max_size=80,
    )
)
def test_random_adds_steps_and_aborts_lose_no_page(operations):
    engine = make_engine(num_pages=12, page_size=4, max_num_seqs=4, max_num_batched_tokens=10)
    prompts: dict[str, list[int]] = {}
    parts: dict[str, list] = {}
    aborted = set()
    for kind, a, b in operations:
        if kind == "add":
            name = str(len(prompts))
            prompts[name] = [(a * 31 + j) % 1000 for j in range(a)]
            engine.add(request(name, prompts[name], b))
        elif kind == "abort":
            ended = engine.abort(str(a))
            if ended is not None:
                assert ended.outputs[0].finish_reason == "abort"
                aborted.add(str(a))
        else:
            for output in engine.step():
                parts.setdefault(output.request_id, []).append(output)
        engine.check_invariants()
    for name, more in drain(engine).items():
        parts.setdefault(name, []).extend(more)
    for name, prompt in prompts.items():
        if name not in aborted:
            ids = token_ids(parts[name])
            assert ids == expected_tokens(prompt, len(ids))
    assert engine.scheduler.kv.num_available_pages == 11


def test_static_scheduling_admits_no_one_until_the_batch_is_drained():
    engine = make_engine(max_num_seqs=2, scheduling="static")
    for name, out in (("a", 3), ("b", 9), ("c", 3)):
        engine.add(request(name, [1, 2, 3], out))
    first_c = last_b = None
    for step in range(40):
        for output in engine.step():
            if output.request_id == "c" and first_c is None:
                first_c = step
            if output.request_id == "b":
                last_b = step
    assert first_c == last_b + 1


def test_a_plan_without_samples_skips_the_sampler():
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(request("long", list(range(20)), 1))
    assert engine.step() == []
    assert engine.executor.last_batch.num_rows == 0


@pytest.mark.parametrize(
    ("limit", "rungs"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (16, (1, 2, 4, 8, 16))]
)
def test_ladder_ends_at_its_limit(limit, rungs):
    assert ladder(limit) == rungs


def test_buckets_lower_max_num_seqs_to_the_budget_and_refuse_what_they_cannot_hold():
    buckets = Buckets.make(max_num_seqs=32, max_num_batched_tokens=6)
    assert buckets.max_num_seqs == 6
    assert buckets.pick(5, 3) == Bucket(6, 4)
    with pytest.raises(ValueError, match="7 tokens pass the largest bucket of 6"):
        buckets.pick(7, 1)


def test_a_submitted_batch_cannot_be_written():
    engine = make_engine()
    engine.add(request("a", [1, 2, 3], 4))
    engine.step()
    batch = engine.executor.last_batch
    for name in ("token_ids", "page_table", "kv_lens", "logit_rows", "temperature"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(batch, name)[0] = 1


def test_a_batch_is_not_changed_by_later_steps():
    engine = make_engine(page_size=4)
    engine.add(request("a", [1, 2, 3, 4], 12))
    engine.step()
    first = engine.executor.last_batch
    table = first.page_table.copy()
    drain(engine)
    assert (first.page_table == table).all()
