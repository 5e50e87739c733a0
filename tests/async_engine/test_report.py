"""Reports of an engine at work: every step once, a map that agrees with the counts, plain data."""

from collections import Counter

import msgspec

from jaxserve.async_engine.report import MAX_STEPS, MAX_TOKEN_IDS, EngineReport, ReportCollector
from jaxserve.pages.page_map import PageState
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.fakes import make_engine


def add(engine, name, *, prompt=(1, 2, 3), **options):
    salt = options.pop("cache_salt", None)
    params = SamplingParams(temperature=0.0, **{"max_tokens": 8} | options)
    engine.add(Request(id=name, prompt_token_ids=prompt, sampling_params=params, cache_salt=salt))


def test_an_engine_that_did_nothing():
    report = ReportCollector(make_engine()).report(with_pages=True)
    assert (report.last_step, report.steps, report.prefixes) == (0, (), ())
    assert report.pages is not None
    assert Counter(report.pages.states) == {PageState.NULL: 1, PageState.FREE: 63}


def test_every_step_is_told_once_by_its_number():
    engine = make_engine()
    collector = ReportCollector(engine)
    add(engine, "a")
    seen = []
    while engine.has_work():
        engine.step()
        seen += collector.report(since_step=len(seen)).steps
    assert [step.number for step in seen] == list(range(1, 9))
    assert collector.report().steps == tuple(seen)
    assert collector.report(since_step=8).steps == ()
    assert collector.report(since_step=99).steps == ()  # of an engine that was there before
    times = [step.time_s for step in seen]
    assert times == sorted(times)
    assert collector.report().time_s >= times[-1]


def test_only_the_last_steps_are_kept():
    engine = make_engine(num_pages=200, max_model_len=700)
    collector = ReportCollector(engine)
    add(engine, "a", max_tokens=MAX_STEPS + 5)
    while engine.has_work():
        engine.step()
    report = collector.report(since_step=2)
    assert report.last_step == MAX_STEPS + 5
    assert [step.number for step in report.steps] == list(range(6, MAX_STEPS + 6))


def test_a_step_says_what_it_was_made_of():
    engine = make_engine()
    collector = ReportCollector(engine)
    add(engine, "a", prompt=(1, 2, 3))
    engine.step()
    add(engine, "b", prompt=range(5, 15))
    engine.step()
    first, second = collector.report().steps
    assert (first.num_seqs, first.num_decode_tokens, first.num_chunk_tokens) == (1, 0, 3)
    assert (second.num_seqs, second.num_decode_tokens, second.num_chunk_tokens) == (2, 1, 10)
    for step in (first, second):
        num_tokens = step.num_decode_tokens + step.num_chunk_tokens + step.num_padding_tokens
        assert num_tokens == step.bucket_num_tokens
        assert step.num_sampled_tokens == step.num_seqs
        assert step.seconds > 0
    assert (second.num_running, second.num_waiting) == (2, 0)


def test_several_steps_in_one_count_all_their_tokens():
    engine = make_engine(num_decode_steps=4)
    collector = ReportCollector(engine)
    add(engine, "a", max_tokens=9)
    while engine.has_work():
        engine.step()
    steps = collector.report().steps
    assert sum(step.num_sampled_tokens for step in steps) == 9
    assert sum(step.num_decode_tokens for step in steps) == 8


def test_the_map_agrees_with_the_counts_in_every_step():
    engine = make_engine(num_pages=24, max_num_seqs=4, num_host_pages=8, async_scheduling=True)
    collector = ReportCollector(engine)
    for number in range(8):
        add(engine, str(number), prompt=[1] * 9 + [number], max_tokens=20, n=1 + number % 3)
    preempted = shared = 0
    while engine.has_work():
        engine.step()
        report = collector.report(with_pages=True)
        assert report.pages is not None
        found, stats = Counter(report.pages.states), report.stats
        assert found[PageState.NULL] == 1
        assert found[PageState.FREE] == stats.num_free_pages
        assert found[PageState.CACHED] == stats.num_cached_pages
        assert found[PageState.OWNED] + found[PageState.SHARED] == stats.num_owned_pages
        assert sum(report.pages.host_pages) == stats.num_host_pages - stats.num_free_host_pages
        preempted, shared = stats.num_preemptions, max(shared, found[PageState.SHARED])
    assert preempted, "nothing was preempted: the pool is too large for this test"
    assert shared, "nothing was shared"


def test_maps_and_prefixes_are_made_only_when_asked_for():
    engine = make_engine()
    collector = ReportCollector(engine)
    add(engine, "a", prompt=[1] * 8)
    engine.step()
    assert collector.report().pages is None
    assert collector.report().prefixes == ()
    assert collector.report(with_pages=True).prefixes


def test_prefixes_under_a_salt_show_no_tokens():
    engine = make_engine()
    collector = ReportCollector(engine)
    add(engine, "open", prompt=[7] * 80)
    add(engine, "salted", prompt=[9] * 80, cache_salt="mine")
    for _ in range(8):
        engine.step()
    found = {one.is_private: one.token_ids for one in collector.report(with_pages=True).prefixes}
    assert found == {False: (7,) * MAX_TOKEN_IDS, True: ()}


def test_a_report_survives_msgspec():
    engine = make_engine(num_host_pages=4)
    collector = ReportCollector(engine)
    add(engine, "a", prompt=[1] * 8, n=2)
    for _ in range(3):
        engine.step()
    report = collector.report(with_pages=True)
    for module in (msgspec.msgpack, msgspec.json):
        assert module.decode(module.encode(report), type=EngineReport) == report


def test_waiting_tokens_are_counted():
    engine = make_engine(max_num_seqs=1)
    collector = ReportCollector(engine)
    add(engine, "a")
    add(engine, "b", prompt=range(5, 15))
    engine.step()
    report = collector.report()
    assert (report.stats.num_waiting, report.num_waiting_tokens) == (1, 10)


def test_closed_it_looks_on_no_longer():
    engine = make_engine()
    collector = ReportCollector(engine)
    add(engine, "a")
    engine.step()
    collector.close()
    assert engine.observers == []
    engine.step()
    assert collector.report().last_step == 1
