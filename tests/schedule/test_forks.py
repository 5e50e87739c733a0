"""Forks, held and resumed sequences: what they share, what they give up, and that they go on right.

More examples: raise `max_examples`.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxserve.schedule.queue import POLICIES
from jaxserve.schedule.sequence import Sequence, Status
from tests.fakes import make_engine
from tests.schedule.direct import Direct
from tests.schedule.runs import Run


def counters(run: Direct | Run):
    scheduler = run.scheduler if isinstance(run, Direct) else run.engine.scheduler
    return scheduler.counters


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_a_fork_at_any_position_computes_only_what_is_new(num_tokens):
    run = Direct()
    parent = run.add(range(10), 20)
    run.steps(4)
    assert parent.num_computed_tokens == 13
    before = run.executor.num_computed_tokens
    child = run.fork(parent, num_tokens, [900, 901], 1)
    assert child.num_computed_tokens == child.num_cached_tokens == num_tokens
    run.hold(parent)
    run.step()
    assert run.executor.num_computed_tokens - before == 2
    assert counters(run).num_copied_pages == (1 if num_tokens % 4 else 0)
    run.drain()
    run.check_all_pages_are_back()


def test_a_fork_without_new_tokens_computes_one():
    run = Direct()
    parent = run.add(range(8), 9)
    run.step()
    before = run.executor.num_computed_tokens
    run.fork(parent, 8, [], 1)
    run.hold(parent)
    run.step()
    assert run.executor.num_computed_tokens - before == 1
    run.drain()


def test_a_fork_of_one_that_has_no_pages_begins_from_the_cache():
    for state in ("waiting", "finished", "swapped"):
        run = Direct(num_host_pages=9, preemption_mode="swap")
        parent = run.add(range(10), 9)
        if state != "waiting":
            run.steps(2)
        if state == "finished":
            run.finish(parent)
        elif state == "swapped":
            run.scheduler._preempt(parent)
        child = run.fork(parent, 10, [50], 3)
        assert not len(child.page_table)
        run.drain()
        assert child.num_cached_tokens == {"waiting": 8, "finished": 8, "swapped": 8}[state]
        run.check_all_pages_are_back()


def test_branches_of_a_tree_search_compute_nothing_twice():
    """Branch, retreat, branch again from a held node."""
    run = Run(make_engine())
    run.add("root", range(10), 5, hold=True)
    run.drain()
    engine = run.engine
    for i in range(3):
        before = engine.executor.num_computed_tokens
        engine.fork("root", f"branch {i}", append_token_ids=[100 + i], hold=True)
        run.drain()
        assert engine.executor.num_computed_tokens - before == 2 + 4
    for i, num_tokens in enumerate((12, 8, 3)):
        before = engine.executor.num_computed_tokens
        engine.fork("branch 1", f"retreat {i}", num_tokens=num_tokens, append_token_ids=[200])
        run.drain()
        assert engine.executor.num_computed_tokens - before == 1 + 4
    for name in ("root", "branch 0", "branch 1", "branch 2"):
        engine.abort(name)
    run.check_all_pages_are_back()


def test_the_first_writer_copies_and_the_last_writes_in_place():
    run = Direct()
    parent = run.add(range(5), 6)
    run.step()
    children = [run.fork(parent, 5, [900 + i], 6) for i in range(2)]
    run.step()
    assert counters(run).num_copied_pages == 2
    run.drain()
    assert counters(run).num_copied_pages == 2
    assert not any(len(child.page_table) for child in children)
    run.check_all_pages_are_back()


@pytest.mark.parametrize("admission", sorted(POLICIES))
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
def test_choices_of_several_prompts_with_any_number_of_slots(max_num_seqs, admission):
    run = Run(make_engine(max_num_seqs=max_num_seqs, admission=admission))
    for length in (5, 8, 11):
        run.add(str(length), range(80 * length, 80 * length + length), 6, n=3)
    run.drain()
    run.check_outputs()
    assert counters(run).num_forks == 6
    run.check_all_pages_are_back()


def test_ending_one_choice_changes_nothing_for_the_others():
    run = Run(make_engine())
    run.add("a", range(10), 8, n=3)
    run.step(3)
    run.engine.abort("a", index=1)
    run.engine.check_invariants()
    parts = {}
    while run.engine.has_work():
        for output in run.engine.step():
            for choice in output.outputs:
                parts.setdefault(choice.index, []).extend(choice.token_ids)
        run.engine.check_invariants()
    assert set(parts) == {0, 2}
    run.check_all_pages_are_back()


# Giving up


def test_held_and_parked_pages_go_before_anyone_is_preempted_and_the_newest_goes_first():
    run = Direct(num_pages=13)
    runner = run.add(range(8), 41)  # needs the whole pool in the end
    nodes = [run.add(range(100 * i, 100 * i + 7), 9) for i in (1, 2, 3)]
    run.step()
    for node in nodes:
        run.hold(node)
    given_up = []
    while runner in run.seqs:
        run.step()
        given_up += [one for one in nodes if not len(one.page_table) and one not in given_up]
    assert given_up == nodes[::-1]
    assert counters(run).num_parked_given_up == 3
    assert counters(run).num_preemptions == 0
    run.drain()
    run.check_all_pages_are_back()


@pytest.mark.parametrize("has_ended", [True, False])
def test_while_others_run_a_newcomer_takes_from_ended_ones_but_not_from_older_ones(has_ended):
    run = Direct(num_pages=10, enable_prefix_caching=False)
    runner = run.add([1], 30)
    held = run.add(range(20), 9, hold=has_ended)
    run.step()
    run.hold(held)
    newcomer = run.add(range(200, 212), 2)  # needs 3 pages and one for the runner; 3 are left
    run.step()
    assert (newcomer.status is Status.WAITING) is not has_ended
    assert len(held.page_table) == (0 if has_ended else 5)
    assert runner.num_preemptions == 0
    run.drain()
    run.check_all_pages_are_back()


def test_a_fork_that_waits_to_be_held_later_has_not_ended():
    run = Direct(num_pages=10, enable_prefix_caching=False, admission="priority", max_num_seqs=2)
    run.add([1], 30)
    parent = run.add(range(20), 9)
    run.step()
    child = run.fork(parent, 20, [7], 3, priority=9, hold=True)
    run.finish(parent)
    newcomer = run.add(range(200, 212), 2)
    run.step()
    assert newcomer.status is Status.WAITING
    assert len(child.page_table) == 5
    run.drain()
    run.check_all_pages_are_back()


def test_while_others_run_a_newcomer_takes_from_newer_ones():
    run = Direct(num_pages=10, enable_prefix_caching=False)
    run.add([1], 30)
    older = run.make(range(200, 212), 2)
    run.seqs.remove(older)  # in no queue yet
    newer = run.add(range(300, 320), 9)
    run.step()
    run.hold(newer)
    run.seqs.append(older)
    run.scheduler.add(older)
    run.step()
    assert older.status is not Status.WAITING
    assert not len(newer.page_table)
    run.drain()
    run.check_all_pages_are_back()


def test_a_newcomer_takes_nothing_where_all_would_not_do():
    run = Direct(num_pages=21)
    ended = run.add(range(7), 9, hold=True)
    run.step()
    run.hold(ended)
    run.add(range(100, 130), 20)
    run.step()
    late = run.add(range(200, 256), 1)
    run.steps(3)
    assert late.status is Status.WAITING
    assert len(ended.page_table) == 2
    assert counters(run).num_parked_given_up == 0
    run.drain()
    run.check_all_pages_are_back()


def test_when_nothing_runs_a_newcomer_takes_what_it_needs():
    run = Direct(num_pages=9, enable_prefix_caching=False)
    held = [run.add(range(100 * i, 100 * i + 8), 9) for i in range(3)]
    run.step()
    for seq in held:
        run.hold(seq)
    newcomer = run.add(range(500, 516), 2)
    run.step()
    assert newcomer.status is Status.RUNNING
    assert [len(seq.page_table) for seq in held] == [2, 2, 0]
    run.drain()
    run.check_all_pages_are_back()


def test_what_a_newcomer_needs_is_counted_again_when_a_sharer_gives_up():
    """The child would copy its page only because the held one has it too."""
    run = Direct(num_pages=6, enable_prefix_caching=False)
    run.add(range(300, 305), 3)
    parent = run.add(range(5), 8, hold=True)
    run.step()
    run.hold(parent)
    child = run.fork(parent, 5, [900], 3)
    run.step()
    assert child.status is Status.RUNNING
    assert not len(parent.page_table)
    assert counters(run).num_copied_pages == 0
    run.drain()
    run.check_all_pages_are_back()


def test_a_parked_child_whose_pages_were_taken_computes_them_again():
    run = Direct(num_pages=7, max_num_seqs=1, enable_prefix_caching=False)
    parent = run.add(range(10), 14)
    run.step()
    child = run.fork(parent, 10, [900], 4)
    assert len(child.page_table) == 3
    while parent in run.seqs:
        run.step()
    assert child.num_computed_tokens == 0 or child.status is Status.RUNNING
    assert counters(run).num_parked_given_up == 1
    run.drain()
    run.check_all_pages_are_back()


def test_with_all_pages_held_work_goes_on():
    run = Direct(num_pages=5)
    for i in range(2):
        seq = run.add(range(100 * i, 100 * i + 7), 9)
        run.step()
        run.hold(seq)
    assert run.scheduler.kv.num_available_pages == 0
    assert not run.scheduler.has_work()
    assert run.scheduler.schedule() is None
    late = run.add(range(500, 516), 1)
    run.step()
    assert late not in run.seqs
    run.drain()
    run.check_all_pages_are_back()


def test_a_resumed_sequence_goes_on_where_it_was():
    run = Direct()
    seq = run.add(range(10), 9)
    run.steps(3)
    before = run.executor.num_computed_tokens
    run.hold(seq)
    run.steps(3)
    assert run.executor.num_computed_tokens == before
    run.resume(seq)
    assert len(seq.page_table) == 3
    run.step()
    assert run.executor.num_computed_tokens == before + 1
    run.drain()
    run.check_all_pages_are_back()


# Everything at once


class Machine(RuleBasedStateMachine):
    """A scheduler with everything that can be done to it between two steps; every token that comes
    out is checked, all invariants hold after every operation, and in the end everyone ends.
    """

    @initialize(
        num_pages=st.integers(2, 14),
        num_host_pages=st.sampled_from([1, 5, 30]),
        options=st.fixed_dictionaries(
            {
                "admission": st.sampled_from(sorted(POLICIES)),
                "preemption_mode": st.sampled_from(["recompute", "swap", "auto"]),
                "enable_prefix_caching": st.sampled_from([True, True, False]),
                "scheduling": st.sampled_from(["continuous", "continuous", "static"]),
                "max_num_seqs": st.integers(1, 6),
                "max_num_batched_tokens": st.sampled_from([1, 3, 8, 40]),
                "max_num_partial_prefills": st.sampled_from([None, 1, 3]),
                "target_itl_s": st.sampled_from([None, None, 1e-9]),
                "eviction": st.sampled_from(["lru", "lfu", "fifo", "priority"]),
            }
        ),
    )
    def start(self, num_pages, num_host_pages, options):
        self.run = Direct(num_pages=num_pages, num_host_pages=num_host_pages, **options)

    def pick(self, number: int, *statuses: Status) -> Sequence | None:
        found = [seq for seq in self.run.seqs if not statuses or seq.status in statuses]
        return found[number % len(found)] if found else None

    @rule(
        length=st.integers(1, 60),
        is_same=st.booleans(),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        beam=st.booleans(),
        salt=st.sampled_from([None, None, "a"]),
        hold=st.booleans(),
    )
    def add(self, length, is_same, max_tokens, priority, beam, salt, hold):
        length = min(length, self.run.num_slots)
        first = 0 if is_same else 37 * len(self.run.seqs)
        self.run.add(
            range(first, first + length),
            max_tokens,
            beam=beam,
            priority=priority,
            cache_salt=salt,
            hold=hold,
        )

    @rule(
        number=st.integers(0, 99),
        keep=st.integers(0, 99),
        more=st.lists(st.integers(900, 901), max_size=6),
        max_tokens=st.integers(1, 9),
        beam=st.booleans(),
    )
    def fork(self, number, keep, more, max_tokens, beam):
        parent = self.pick(number)
        if parent is not None:
            num_tokens = 1 + keep % len(parent.token_ids)
            more = more[: self.run.num_slots - num_tokens]
            if num_tokens + len(more) <= self.run.num_slots:
                salt = parent.request.cache_salt
                self.run.fork(parent, num_tokens, more, max_tokens, beam=beam, cache_salt=salt)

    @rule(number=st.integers(0, 99))
    def hold(self, number):
        if seq := self.pick(number, Status.RUNNING):
            self.run.hold(seq)

    @rule(number=st.integers(0, 99))
    def resume(self, number):
        if seq := self.pick(number, Status.HELD):
            self.run.resume(seq)

    @rule(number=st.integers(0, 99))
    def finish(self, number):
        if seq := self.pick(number):
            self.run.finish(seq)

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        self.run.steps(count)

    @precondition(lambda self: self.run.executor.weights < 2)
    @rule()
    def change_weights(self):
        self.run.change_weights()

    @rule(in_the_middle=st.booleans())
    def restart(self, in_the_middle):
        if in_the_middle:
            self.run.scheduler.schedule()
        self.run.restart()

    def teardown(self):
        if hasattr(self, "run"):
            num_tokens = sum(seq.num_prompt_tokens + seq.max_tokens for seq in self.run.seqs)
            self.run.drain(max_steps=200 + 10 * num_tokens)
            self.run.check_all_pages_are_back()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
