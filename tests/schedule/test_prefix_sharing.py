"""Prefixes through the engine: computed once, found by those that come later, never shared across
namespaces, waited for but not for ever.
"""

import pytest

from jaxserve.request import CacheSalt, merge_outputs
from jaxserve.schedule import prefix_wait, scheduler
from tests.fakes import expected_tokens, make_engine
from tests.schedule.runs import Run

PAGE = 4


def num_computed(run: Run) -> int:
    return run.engine.executor.num_computed_tokens


def num_cached(run: Run, name: str) -> int:
    return run.parts[name][0].num_cached_tokens


@pytest.mark.parametrize("admission", ["fcfs", "lpm", "short_first", "priority"])
@pytest.mark.parametrize("budget", [16, 128, 1024])
def test_sixteen_requests_with_one_prefix_compute_it_once(admission, budget):
    prefix = list(range(40))
    run = Run(
        make_engine(
            num_pages=200, max_num_seqs=16, max_num_batched_tokens=budget, admission=admission
        )
    )
    for i in range(16):
        run.add(str(i), [*prefix, 500 + i, 501 + i], 5)
    run.drain()
    run.check_outputs()
    assert num_computed(run) == 40 + 16 * 2 + 16 * 4  # prefix, own ends, outputs but the last
    counters = run.engine.scheduler.counters
    assert counters.num_hit_tokens == 15 * 40
    assert counters.num_queried_tokens == 16 * 42
    assert 1 <= counters.num_prefix_waits <= 15
    assert counters.num_prefix_wait_steps >= counters.num_prefix_waits


def test_a_second_turn_hits_the_answer_of_the_first():
    run = Run(make_engine())
    prompt = list(range(10))
    run.add("first", prompt, 11)
    run.drain()
    answer = merge_outputs(run.parts["first"]).outputs[0].token_ids
    before = num_computed(run)
    run.add("second", [*prompt, *answer, 7, 8, 9], 3)
    run.drain()
    run.check_outputs()
    assert num_cached(run, "second") == 20  # all of the 20 tokens computed are in full pages
    assert num_computed(run) - before == 4 + 2


def test_an_aborted_request_leaves_what_it_computed():
    run = Run(make_engine(max_num_batched_tokens=8))
    run.add("gone", range(30), 5)
    run.step(2)
    run.abort("gone")
    run.add("next", range(30), 5)
    run.drain()
    run.check_outputs()
    assert num_cached(run, "next") == 16


def test_a_preempted_request_leaves_its_pages_and_finds_them_again():
    run = Run(make_engine(num_pages=9, max_num_seqs=2))
    run.add("old", range(8), 12)
    run.add("new", range(100, 108), 12)
    while not (new := run.sequence("new")).num_preemptions:
        run.step()
    assert run.engine.scheduler.kv.peek(run.engine.scheduler.namespace(new), new.token_ids) >= 8
    before, known = num_computed(run), len(new.token_ids)
    run.drain()
    run.check_outputs()
    assert num_computed(run) - before < known + 24  # less than computing all of it again


@pytest.mark.parametrize("page_size", [4, 8])
@pytest.mark.parametrize("length", range(1, 14))
def test_the_same_prompt_again_alone_and_at_once(length, page_size):
    """At least the last token is computed, and no page of another is written: the fake device
    checks that.
    """
    run = Run(make_engine(page_size=page_size))
    prompt = [3 * i for i in range(length)]
    for i in range(3):
        run.add(f"alone {i}", prompt, 6)
        run.drain()
    for i in range(5):
        run.add(f"at once {i}", prompt, 6)
    run.drain()
    run.check_outputs()
    found = {num_cached(run, name) for name in run.requests if name != "alone 0"}
    full_pages = length // page_size * page_size
    assert found == {min(full_pages, length - 1)}
    assert num_cached(run, "alone 0") == 0


def test_known_prompts_do_not_wait_for_one_another():
    """Each computes its last token again, in the same step: there is nothing to wait for."""
    run = Run(make_engine())
    run.add("first", range(8), 6)
    run.drain()
    for i in range(5):
        run.add(str(i), range(8), 6)
    run.step()
    assert len(run.ids_running()) == 5
    assert run.engine.scheduler.counters.num_prefix_wait_steps == 0
    run.drain()
    run.check_outputs()


def test_nobody_waits_for_a_prefix_without_a_cache():
    run = Run(make_engine(enable_prefix_caching=False))
    for i in range(3):
        run.add(str(i), range(8), 3)
    run.step()
    assert len(run.ids_running()) == 3
    run.drain()
    run.check_outputs()
    assert run.engine.scheduler.counters.num_prefix_wait_steps == 0
    assert run.engine.scheduler.counters.num_hit_tokens == 0


# Namespaces

SALTS = [None, "a", "b", CacheSalt("api_key", "a"), CacheSalt("adapter", "a")]


def test_salts_of_any_kind_share_nothing():
    run = Run(make_engine())
    for i, salt in enumerate(SALTS):
        run.add(f"cold {i}", range(12), 3, cache_salt=salt)
    run.drain()
    for i, salt in enumerate(SALTS):
        run.add(f"warm {i}", range(12), 3, cache_salt=salt)
    run.add("the same kind", range(12), 3, cache_salt=CacheSalt("request", "a"))
    run.drain()
    run.check_outputs()
    assert all(num_cached(run, f"cold {i}") == 0 for i in range(len(SALTS)))
    assert all(num_cached(run, f"warm {i}") == 11 for i in range(len(SALTS)))
    assert num_cached(run, "the same kind") == 11
    assert run.engine.scheduler.counters.num_prefix_waits == 0


def test_other_weights_use_nothing_that_the_first_computed():
    engine = make_engine(num_host_pages=20, preemption_mode="swap", num_pages=12, max_num_seqs=4)
    run = Run(engine)
    run.add("before", range(12), 3)
    run.drain()
    for i in range(3):
        run.add(str(i), range(20 * i, 20 * i + 12), 16)
    while not any(seq.host_pages for seq in run.sequences()):
        run.step()
    known = {seq.request.id: list(seq.token_ids) for seq in run.sequences()}
    engine.update_params(1)
    run.engine.check_invariants()
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable
    assert engine.scheduler.kv.host.num_free == 20
    assert not any(seq.num_computed_tokens for seq in run.sequences())
    run.add("after", range(12), 3)
    run.drain()
    assert num_cached(run, "after") == 0
    assert merge_outputs(run.parts["after"]).outputs[0].token_ids == shifted(range(12), 3)
    for name, ids in known.items():
        whole = [*range(20 * int(name), 20 * int(name) + 12)]
        whole += merge_outputs(run.parts[name]).outputs[0].token_ids
        assert whole[: len(ids)] == ids
        assert whole[len(ids) :] == shifted(ids, 28 - len(ids))


def shifted(prompt, num_tokens: int) -> list[int]:
    """What the fake device makes of it with 1 for its weights."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids += expected_tokens([i + 1 for i in ids], 1)
    return ids[len(prompt) :]


# Waiting for a prefix


def test_a_waiter_goes_on_at_once_when_its_provider_is_aborted():
    run = Run(make_engine(max_num_batched_tokens=8))
    run.add("provider", range(60), 3)
    run.add("waiter", range(50), 3)
    run.step(3)
    assert run.ids_running() == ["provider"]
    run.abort("provider")
    run.step()
    assert run.ids_running() == ["waiter"]
    run.drain()
    run.check_outputs()
    assert num_cached(run, "waiter") == 24


def test_a_waiter_goes_on_at_once_when_its_provider_is_preempted():
    run = Run(make_engine(num_pages=13, max_num_batched_tokens=8, max_num_seqs=3))
    run.add("old", range(100, 112), 33)
    run.step(2)
    run.add("provider", range(28), 2)
    run.add("waiter", [*range(20), 77], 2)
    run.step()
    scheduler = run.engine.scheduler
    provider = run.sequence("provider")
    assert run.ids_running() == ["old", "provider"]
    scheduler._preempt(provider)
    run.abort("provider")
    run.step()
    assert "waiter" in run.ids_running()
    run.drain()
    run.check_outputs()


@pytest.mark.parametrize("admission", ["fcfs", "short_first"])
def test_waiting_is_bounded_and_counted(admission, monkeypatch):
    monkeypatch.setattr(prefix_wait, "MAX_STEPS", 5)
    run = Run(make_engine(max_num_batched_tokens=4, admission=admission, num_pages=100))
    run.add("provider", range(100), 1)
    run.step()
    run.add("waiter", range(60), 1)
    run.step(5)
    assert run.ids_waiting() == ["waiter"]
    run.step()
    assert sorted(run.ids_running()) == ["provider", "waiter"]
    counters = run.engine.scheduler.counters
    assert (counters.num_prefix_waits, counters.num_prefix_wait_steps) == (1, 5)
    run.drain()
    run.check_outputs()


def test_nobody_waits_for_a_prefix_that_differs_before_the_page_ends():
    run = Run(make_engine(max_num_batched_tokens=128))
    run.add("one", range(30), 2)
    run.add("another", [0, 1, 2, 99, *range(4, 30)], 2)
    run.add("short", [0, 1, 2], 2)
    run.step()
    assert len(run.parts) == 3
    assert run.engine.scheduler.counters.num_prefix_waits == 0
    run.drain()
    run.check_outputs()


def test_in_order_a_waiter_holds_up_those_behind_it_and_else_it_is_passed():
    for admission, second_runs in (("fcfs", False), ("lpm", True)):
        run = Run(make_engine(max_num_batched_tokens=16, admission=admission))
        run.add("provider", range(40), 2)
        run.step()
        run.add("waiter", range(36), 2)
        run.add("other", [900], 2)
        run.step()
        assert ("other" in run.ids_running() or "other" in run.parts) is second_runs
        run.drain()
        run.check_outputs()


@pytest.mark.parametrize("num_members", [2, 4])
def test_static_scheduling_forms_its_batch_though_its_members_wait_for_a_prefix(num_members):
    run = Run(make_engine(scheduling="static", max_num_seqs=4))
    for i in range(num_members):
        run.add(str(i), [*range(20), i], 8)
    run.step(2)
    assert len(run.ids_running()) == num_members
    run.drain()
    run.check_outputs()


def test_waiting_for_room_beside_a_cached_prefix_is_one_hit():
    """However many steps it looks for room: eviction by hits would else keep what is wanted once."""
    run = Run(make_engine(num_pages=18, max_model_len=64, eviction="lfu"))
    run.add("cold", range(16), 1)
    run.drain()
    run.add("hog", range(100, 128), 24)
    run.step()
    run.add("blocked", range(40), 2)
    run.step(8)
    assert run.ids_waiting() == ["blocked"]
    tree = run.engine.scheduler.kv.tree
    namespace = run.engine.scheduler.namespace(run.sequence("blocked"))
    hits = tree.match(namespace, list(range(16))).node.num_hits
    run.drain()
    run.check_outputs()
    assert (hits, num_cached(run, "blocked")) == (0, 16)
    assert tree.match(namespace, list(range(16))).node.num_hits == 1


@pytest.mark.parametrize("admission", ["lpm", "short_first"])
def test_a_step_looks_at_so_many_that_wait_and_no_more(admission, monkeypatch):
    """Else thousands that wait for one prefix would hold up every step."""
    monkeypatch.setattr(scheduler, "MAX_PASSED", 3)
    run = Run(make_engine(num_pages=200, admission=admission))
    run.add("long", range(100), 1)
    run.step()
    for i in range(8):
        run.add(str(i), [*range(60), 500 + i], 1)
    run.step()
    assert run.engine.scheduler.counters.num_prefix_wait_steps == 4  # and the one it stops at
    run.drain()
    run.check_outputs()
    assert num_computed(run) == 100 + 8
