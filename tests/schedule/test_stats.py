"""`Engine.stats`: the figures are those of the pages and steps, counted another way."""

import dataclasses
import json
from itertools import chain

import pytest

from jaxserve.engine import Engine
from jaxserve.request import Request
from jaxserve.sampling_params import BeamParams
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.stats import GROUPS, BucketStats, EngineStats
from tests.fakes import drain, make_engine
from tests.schedule.test_schedule_log import add, prompt_of

BEAM = BeamParams(beam_width=2, max_tokens=4)


def num_tokens_held(scheduler: Scheduler) -> int:
    """Page by page: the most that any owner has in it."""
    held: dict[int, int] = {}
    for seq in chain(scheduler.running, scheduler.parked):
        for position in range(seq.num_computed_tokens):
            page = seq.page_table[position // scheduler.kv.page_size]
            filled = position % scheduler.kv.page_size + 1
            held[page] = max(held.get(page, 0), filled)
    return sum(held.values())


def check(engine: Engine) -> EngineStats:
    stats = engine.stats()
    scheduler = engine.scheduler
    owned = {p for s in chain(scheduler.running, scheduler.parked) for p in s.page_table.page_ids}
    assert stats.num_owned_pages == len(owned)
    assert stats.num_pages == 1 + stats.num_free_pages + stats.num_cached_pages + len(owned)
    assert stats.num_kv_tokens == num_tokens_held(scheduler)
    assert 0 <= stats.kv_utilisation <= 1
    if owned:
        slots = len(owned) * stats.page_size
        assert stats.kv_utilisation == pytest.approx(num_tokens_held(scheduler) / slots)
    assert sum(use.num_steps for use in stats.by_bucket.values()) == stats.num_steps
    assert sum(use.num_tokens for use in stats.by_bucket.values()) == stats.num_scheduled_tokens
    return stats


def test_pages_and_tokens_while_sequences_share_swap_and_fork():
    engine = make_engine(num_pages=20, num_host_pages=20, preemption_mode="swap")
    for i in range(5):
        add(engine, f"r{i}", [*prompt_of(18), i], 14, n=1 + i % 2, temperature=0)
    add(engine, "held", prompt_of(6, 1), 3, hold=True)
    seen = []
    while engine.has_work():
        engine.step()
        seen.append(check(engine))
    engine.fork("held", "branch", num_tokens=7)
    check(engine)
    drain(engine)
    last = check(engine)
    assert last.num_held == 1
    assert any(one.num_free_host_pages < one.num_host_pages for one in seen)
    assert last.num_swaps > 0
    assert last.num_preemptions == last.num_swaps + last.num_recomputes
    assert last.hit_rate == last.num_hit_tokens / last.num_queried_tokens > 0.3
    assert last.num_output_tokens == 14 * 7 + 3 + 3


def test_one_step_and_its_padding():
    engine = make_engine(max_num_batched_tokens=32, max_num_seqs=8)
    assert engine.stats().last_step is None
    add(engine, "a", prompt_of(3), 9)
    engine.step()
    add(engine, "b", prompt_of(20, 1), 9)
    engine.step()
    stats = engine.stats()
    step = stats.last_step
    assert (step.num_seqs, step.num_decode_tokens, step.num_chunk_tokens) == (2, 1, 20)
    assert (step.bucket_num_tokens, step.bucket_num_rows, step.num_rows) == (32, 2, 2)
    assert step.num_padding_tokens == 11
    assert stats.by_bucket == {4: BucketStats(1, 3, 1), 32: BucketStats(1, 21, 11)}
    assert stats.by_bucket[32].padding_waste == 11 / 32
    assert stats.padding_waste == 12 / 36


def test_copies_are_in_the_step_that_makes_them():
    engine = make_engine()
    add(engine, "a", prompt_of(6), 4, n=2)
    engine.step()
    engine.step()
    assert engine.stats().last_step.num_copies == 1, "the two choices share the second page"
    drain(engine)
    assert engine.stats().num_copied_pages == 1


def test_branches_count_their_prompt_once_and_look_nothing_up():
    engine = make_engine()
    add(engine, "choices", prompt_of(6), 4, n=3)
    engine.add(Request(id="beams", prompt_token_ids=prompt_of(7, 1), beam=BEAM))
    drain(engine)
    stats = engine.stats()
    assert stats.num_forks > 3
    assert stats.num_prompt_tokens == 6 + 7
    assert stats.num_queried_tokens == 6 + 7


def test_a_fork_is_a_request_that_looks_nothing_up_while_it_has_pages():
    engine = make_engine()
    add(engine, "parent", prompt_of(6), 4)
    engine.fork("parent", "early", num_tokens=6)  # nothing is computed yet
    engine.step()
    engine.step()
    before = engine.stats()
    assert before.num_prompt_tokens == before.num_queried_tokens == 6 + 6
    engine.fork("parent", "late", num_tokens=6, append_token_ids=[9])
    drain(engine)
    stats = engine.stats()
    assert stats.num_prompt_tokens == 6 + 6 + 7
    assert stats.num_queried_tokens == 6 + 6


def test_json_has_every_figure_once():
    engine = make_engine()
    empty = engine.stats().to_dict()
    assert empty["last_step"] is None
    assert empty["prefix_cache"]["hit_rate"] == 0.0
    assert empty["pages"]["kv_utilisation"] == 1.0
    add(engine, "a", prompt_of(6), 4)
    drain(engine)
    figures = json.loads(json.dumps(engine.stats().to_dict(), allow_nan=False))
    assert figures["tokens"]["num_output_tokens"] == 4
    assert figures["by_bucket"]["8"]["padding_waste"] == 2 / 8
    assert figures["last_step"]["num_decode_tokens"] == 1
    named = [name for names in GROUPS.values() for name in names]
    assert len(named) == len(set(named))
    fields = {field.name for field in dataclasses.fields(EngineStats)}
    assert {*named, "by_bucket", "last_step", "roofline"} >= fields
