"""Aborts at every phase of a sequence's life: nothing leaks, and what the others compute is right."""

import random
from collections import Counter

import pytest

from jaxserve.schedule.sequence import Sequence, Status
from tests.schedule.direct import Direct

NUM_ABORTS = 10_000


def phase(seq: Sequence) -> str:
    if seq.status is Status.HELD:
        return "held" if len(seq.page_table) else "held without pages"
    if seq.status is Status.RUNNING:
        return "mid-chunk" if seq.num_tokens_to_compute > 1 else "decoding"
    if seq.host_pages is not None:
        return "swapped"
    if len(seq.page_table):
        return "parked"
    return "queued" if seq.status is Status.WAITING else "preempted"


def add_or_fork(run: Direct, dice: random.Random) -> None:
    parent = dice.choice(run.seqs) if run.seqs and dice.random() < 0.4 else None
    num_more = dice.randint(0, 12)
    if parent is None:
        first = dice.choice([0, 0, 100, 200])
        run.add(range(first, first + 1 + num_more * 2), dice.randint(10, 40))
    else:
        num_tokens = dice.randint(1, min(len(parent.token_ids), 30))
        run.fork(parent, num_tokens, range(500, 500 + num_more), dice.randint(10, 20))


def test_ten_thousand_aborts_at_every_phase_leak_nothing(monkeypatch):
    run = Direct(
        num_pages=14,
        num_host_pages=6,
        preemption_mode="swap",
        max_num_seqs=6,
        max_num_batched_tokens=24,
    )
    dice = random.Random(4)
    check, num_checks = run.check, 0

    def check_now_and_then() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks % 100 == 0:
            check()

    monkeypatch.setattr(run, "check", check_now_and_then)
    phases: Counter[str] = Counter()
    while phases.total() < NUM_ABORTS:
        for _ in range(dice.randint(0, 4)):
            if len(run.seqs) < 14:
                add_or_fork(run, dice)
        run.steps(dice.randint(0, 3))
        if run.scheduler.running and dice.random() < 0.15:
            run.hold(dice.choice(run.scheduler.running))
        if run.scheduler.held and dice.random() < 0.15:
            run.resume(dice.choice(run.scheduler.held))
        for _ in range(dice.randint(0, 3)):
            if run.seqs:
                wanted = dice.choice(sorted({phase(seq) for seq in run.seqs}))
                phases[wanted] += 1
                run.finish(dice.choice([seq for seq in run.seqs if phase(seq) == wanted]))
    check()
    everyone = (
        "queued",
        "preempted",
        "swapped",
        "parked",
        "mid-chunk",
        "decoding",
        "held",
        "held without pages",
    )
    assert all(phases[one] >= 25 for one in everyone), phases
    run.drain()
    run.check_all_pages_are_back()


@pytest.mark.parametrize("caching", [True, False])
def test_an_abort_returns_every_page_at_once(caching):
    run = Direct(num_pages=20, enable_prefix_caching=caching, max_num_batched_tokens=8)
    kv = run.scheduler.kv
    decoding = run.add(range(5), 9)
    run.step()
    chunked, queued = run.add(range(100, 140), 9), run.add(range(200, 230), 9)
    run.step()
    assert decoding.num_output_tokens
    assert chunked.num_tokens_to_compute > 1
    child = run.fork(decoding, 5, [50], 3)
    for seq in (queued, chunked, child, decoding):
        run.finish(seq)
        run.finish(seq) if seq in run.seqs else run.scheduler.finish(seq)  # twice is once
    assert kv.num_owned_pages == 0
    assert kv.num_available_pages == kv.pool.num_usable
    assert run.scheduler.schedule() is None


def test_aborting_the_parent_leaves_its_children_their_pages():
    run = Direct()
    parent = run.add(range(10), 9)
    run.step()
    children = [run.fork(parent, 10, [900 + i], 5) for i in range(2)]
    run.finish(parent)
    before = run.executor.num_computed_tokens
    run.step()
    assert run.executor.num_computed_tokens - before == 2
    assert run.scheduler.counters.num_copied_pages == 1
    run.finish(children[0])
    run.drain()
    run.check_all_pages_are_back()
