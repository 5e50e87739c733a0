"""Where things just fit, or only one can go on."""

import pytest

from jaxserve.schedule.queue import POLICIES
from jaxserve.schedule.sequence import Status
from tests.fakes import make_engine
from tests.schedule.direct import Direct
from tests.schedule.runs import Run


@pytest.mark.parametrize("budget", [1, 4, 16, 40])
@pytest.mark.parametrize("times", [1, 3])
def test_a_full_hit_that_fills_the_whole_pool(times, budget):
    """There is no page left for a copy of its last one: that is computed again as a whole."""
    run = Run(make_engine(num_pages=5, max_num_batched_tokens=budget))
    run.add("cold", range(16), 1)
    run.drain()
    for i in range(times):
        run.add(str(i), range(16), 1)
    run.drain(max_steps=20 * times)
    run.check_outputs()
    assert {run.parts[str(i)][0].num_cached_tokens for i in range(times)} == {12}
    run.check_all_pages_are_back()


def test_a_full_hit_with_one_page_to_spare_is_copied():
    run = Run(make_engine(num_pages=6))
    for name in ("cold", "warm"):
        run.add(name, range(16), 1)
        run.drain()
    run.check_outputs()
    assert run.parts["warm"][0].num_cached_tokens == 15
    assert run.engine.scheduler.counters.num_copied_pages == 1


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("admission", sorted(POLICIES))
def test_a_pool_for_one_request_at_a_time(admission, caching):
    run = Run(make_engine(num_pages=4, admission=admission, enable_prefix_caching=caching))
    for i in range(5):
        run.add(str(i), range(100 * i, 100 * i + 9), 4)
    run.drain(max_steps=40)
    run.check_outputs()
    assert run.engine.scheduler.counters.num_preemptions == 0
    run.check_all_pages_are_back()


def test_a_request_that_outgrows_the_pool_ends_when_it_is_full():
    run = Run(make_engine(num_pages=9, max_model_len=128))
    run.add("large", range(20), 100)
    run.add("small", range(300, 304), 5)
    run.drain(max_steps=200)
    run.check_outputs()
    assert len(run.steps["large"]) == 32 - 20 + 1


@pytest.mark.parametrize("admission", sorted(POLICIES))
def test_a_budget_of_one_token(admission):
    run = Run(make_engine(max_num_batched_tokens=1, admission=admission))
    for i in range(4):
        run.add(str(i), [5, 6, 7, 8, 9, i], 3, n=2 if i == 1 else 1)
    run.drain(max_steps=100)
    run.check_outputs()
    assert run.engine.scheduler.buckets.max_num_seqs == 1
    run.check_all_pages_are_back()


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_page_larger_than_everything(page_size):
    run = Run(make_engine(page_size=page_size, num_pages=4))
    for i in range(6):
        run.add(str(i), range(5), 6, n=2 if i == 1 else 1)
    run.drain(max_steps=60)
    run.check_outputs()
    assert run.engine.scheduler.counters.num_hit_tokens == 0
    run.check_all_pages_are_back()


def test_tokens_that_nobody_takes_make_chunks_longer():
    """The long prompt leaves a part of the budget to a request that finds no slot."""
    run = Run(
        make_engine(
            max_num_batched_tokens=16, long_prefill_token_threshold=4, max_num_seqs=2, num_pages=100
        )
    )
    run.add("stream", [1], 20)
    run.step()
    run.add("long", range(100, 190), 2)
    run.add("waits", range(5), 2)
    run.step(2)
    assert run.ids_running() == ["stream", "long"]
    assert run.sequence("long").num_computed_tokens == 2 * 15
    run.drain()
    run.check_outputs()


def test_longer_chunks_take_no_page_that_somebody_else_would_have_to_give_up():
    run = Direct(num_pages=11, max_num_batched_tokens=16, long_prefill_token_threshold=4,
                 enable_prefix_caching=False)  # fmt: skip
    first = run.add(range(100, 107), 20)
    run.step()
    second = run.add(range(30), 2)
    blocked = run.add(range(200, 230), 2)
    run.step()
    assert blocked.status is Status.WAITING
    assert (first.num_preemptions, second.num_preemptions) == (0, 0)
    run.drain()
    run.check_all_pages_are_back()


# Starting over


@pytest.mark.parametrize("caching", [True, False])
def test_other_weights_with_swapped_held_and_parked_sequences(caching):
    run = Direct(
        num_pages=12,
        num_host_pages=20,
        preemption_mode="swap",
        max_num_seqs=3,
        enable_prefix_caching=caching,
    )
    held = run.add(range(10), 20)
    run.step()
    run.hold(held)
    parked = run.fork(held, 10, [50], 5)
    others = [run.add(range(100 * i, 100 * i + 8), 20) for i in (1, 2)]
    run.step()
    run.scheduler._preempt(others[1])
    run.step()
    run.change_weights()
    assert held.status is Status.HELD
    for seq in (held, parked, *others):
        assert (len(seq.page_table), seq.host_pages, seq.num_computed_tokens) == (0, None, 0)
    run.step()
    run.change_weights()
    run.drain()
    run.check_all_pages_are_back()


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("scheduling", ["continuous", "static"])
def test_restarting_at_any_time(scheduling, num_steps):
    run = Direct(
        num_pages=10,
        num_host_pages=20,
        preemption_mode="swap",
        max_num_batched_tokens=8,
        scheduling=scheduling,
    )
    seqs = [run.add(range(100 * i, 100 * i + 8), 9) for i in range(4)]
    run.steps(num_steps)
    if seqs[0].status is Status.RUNNING:
        run.hold(seqs[0])
        run.fork(seqs[0], 4, [5], 3)
    run.steps(num_steps)
    tokens = {seq: seq.token_ids[:] for seq in run.seqs}
    held = list(run.scheduler.held)
    run.scheduler.schedule()  # planned, with pages and moves taken, and never run
    run.restart()
    assert run.scheduler.held == held
    assert {seq: seq.token_ids for seq in run.seqs} == tokens
    kv = run.scheduler.kv
    assert (kv.pool.num_free, kv.host.num_free) == (kv.pool.num_usable, 20)
    run.drain()
    run.check_all_pages_are_back()


# What the invariants find


def damage_order(run: Direct) -> None:
    run.scheduler.running.reverse()


def damage_pages(run: Direct) -> None:
    run.scheduler.kv.pool.alloc(1)


def damage_parked(run: Direct) -> None:
    run.scheduler.parked.add(run.scheduler.running[0])


def damage_progress(run: Direct) -> None:
    seq = run.scheduler.running[0]
    seq.num_computed_tokens = len(seq.token_ids)


def damage_queue(run: Direct) -> None:
    run.scheduler.held.append(run.scheduler.running[0])


def damage_host(run: Direct) -> None:
    run.scheduler.kv.host.alloc(1)


def damage_lock(run: Direct) -> None:
    table = run.scheduler.running[0].page_table
    run.scheduler.kv.tree.unlock(table.node)


def damage_path(run: Direct) -> None:
    run.scheduler.running[0].page_table.num_tree_pages = 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_order, "out of order"),
        (damage_pages, "ref_count 1, owners 0"),
        (damage_parked, "not parked"),
        (damage_progress, "nothing to compute"),
        (damage_queue, "held, but running"),
        (damage_host, "host page is lost"),
        (damage_lock, "lock"),
        (damage_path, "not the path"),
    ],
)
def test_damage_is_found(damage, message):
    run = Direct(num_host_pages=3)
    for i in range(2):
        run.add(range(100 * i, 100 * i + 9), 9)
    run.step()
    damage(run)
    with pytest.raises(AssertionError, match=message):
        run.scheduler.check_invariants()
