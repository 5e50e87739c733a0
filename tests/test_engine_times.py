"""`RequestOutput.times`: on the last output of every request, in order, whatever happened to it."""

import itertools

import pytest

from jaxserve.groups.outbox import Outbox
from jaxserve.request import Request, RequestOutput, merge_outputs
from jaxserve.sampling_params import BeamParams, SamplingParams
from tests.fakes import drain, make_engine


class Clock:
    """Goes on by a second whenever somebody looks."""

    def __init__(self):
        self.ticks = itertools.count(1)
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s = float(next(self.ticks))
        return self.now_s


def request(name="a", *, prompt=(1, 2, 3), **options) -> Request:
    params = SamplingParams(temperature=0.0, **{"max_tokens": 4} | options)
    return Request(id=name, prompt_token_ids=prompt, sampling_params=params)


def run(engine) -> dict[str, RequestOutput]:
    """The last output of each request; none before it has times."""
    parts = drain(engine)
    for one in parts.values():
        assert [part.times is not None for part in one] == [False] * (len(one) - 1) + [True]
        assert merge_outputs(one).times == one[-1].times
    return {name: one[-1] for name, one in parts.items()}


def in_order(output: RequestOutput) -> bool:
    times = [when for when in output.times if when is not None]
    return times == sorted(times)


@pytest.mark.parametrize("is_async", [False, True])
def test_times_of_a_plain_request(is_async):
    clock = Clock()
    engine = make_engine(clock=clock, async_scheduling=is_async)
    engine.add(request())
    added_s = clock.now_s
    times = run(engine)["a"].times
    assert times.arrival_s == added_s
    assert times.arrival_s < times.first_scheduled_s < times.first_token_s < times.last_token_s


def test_one_token_is_the_first_and_the_last():
    engine = make_engine(clock=Clock())
    engine.add(request(max_tokens=1))
    times = run(engine)["a"].times
    assert times.first_token_s == times.last_token_s


def test_who_waits_is_scheduled_later():
    engine = make_engine(clock=Clock(), max_num_seqs=1)
    engine.add(request("a"))
    engine.add(request("b"))
    done = run(engine)
    assert done["b"].times.first_scheduled_s > done["a"].times.last_token_s
    assert done["b"].times.arrival_s < done["a"].times.first_scheduled_s


def test_a_prompt_in_chunks_gets_its_first_token_after_the_last_of_them():
    engine = make_engine(clock=Clock(), max_num_batched_tokens=8)
    engine.add(request(prompt=range(1, 41)))
    engine.step()
    scheduled_s = engine.clock.now_s
    times = run(engine)["a"].times
    assert times.first_scheduled_s < scheduled_s
    assert times.first_token_s > scheduled_s + 3


@pytest.mark.parametrize("num_host_pages", [0, 16])
def test_a_preemption_changes_nothing_that_has_happened(num_host_pages):
    clock = Clock()
    engine = make_engine(
        clock=clock, num_pages=13, num_host_pages=num_host_pages, async_scheduling=True
    )
    for number in range(4):
        engine.add(request(str(number), prompt=[number + 1] * 6, max_tokens=30))
    engine.step()
    engine.step()
    seen = {seq.request.id: seq.first_scheduled_s for seq in engine.scheduler.running}
    started_s = clock.now_s
    done = run(engine)
    assert engine.stats().num_preemptions > 0
    assert seen
    assert all(done[name].times.first_scheduled_s == when for name, when in seen.items())
    assert all(done[name].times.first_token_s < started_s + 5 for name in seen)
    assert all(in_order(output) for output in done.values())
    assert all(output.times.last_token_s is not None for output in done.values())


def test_a_prefix_hit_is_scheduled_like_any_other():
    engine = make_engine(clock=Clock())
    engine.add(request("a", prompt=[1] * 20))
    run(engine)
    engine.add(request("b", prompt=[1] * 20))
    output = run(engine)["b"]
    assert output.num_cached_tokens > 0
    assert None not in output.times
    assert in_order(output)


def test_choices_have_the_times_of_their_request():
    engine = make_engine(clock=Clock())
    engine.add(request(n=3))
    times = run(engine)["a"].times
    assert times.arrival_s < times.first_scheduled_s < times.first_token_s < times.last_token_s


def test_choices_whose_leader_was_aborted_before_its_turn():
    engine = make_engine(clock=Clock())
    engine.add(request(n=3))
    engine.abort("a", 0)
    output = run(engine)["a"]
    assert None not in output.times
    assert in_order(output)


def test_beams():
    engine = make_engine(clock=Clock())
    beam = BeamParams(beam_width=2, max_tokens=4)
    engine.add(Request(id="a", prompt_token_ids=[1, 2, 3], beam=beam))
    output = run(engine)["a"]
    assert None not in output.times
    assert in_order(output)


def test_a_fork_arrives_when_it_is_made():
    engine = make_engine(clock=Clock())
    engine.add(request("a", max_tokens=20))
    for _ in range(3):
        engine.step()
    before_s = engine.clock.now_s
    engine.fork("a", "b")
    done = run(engine)
    assert done["b"].times.arrival_s > before_s
    assert in_order(done["b"])


def test_aborted_while_it_waits():
    engine = make_engine(clock=Clock())
    engine.add(request())
    times = engine.abort("a").times
    assert times.arrival_s > 0
    assert times[1:] == (None, None, None)


def test_aborted_while_it_runs():
    engine = make_engine(clock=Clock())
    engine.add(request(max_tokens=50))
    for _ in range(3):
        engine.step()
    output = engine.abort("a")
    assert output.times is not None
    assert in_order(output)
    assert output.times.last_token_s > output.times.first_token_s


def test_one_choice_aborted_says_nothing_yet():
    engine = make_engine(clock=Clock())
    engine.add(request(n=2, max_tokens=50))
    engine.step()
    engine.step()
    assert engine.abort("a", 1).times is None
    assert engine.abort("a").times is not None


def test_a_request_that_fails_has_no_token():
    engine = make_engine(clock=Clock(), poison=[77])
    engine.add(request(prompt=[77, 1]))
    output = run(engine)["a"]
    assert output.outputs[0].finish_reason == "error"
    assert output.times.first_scheduled_s is not None
    assert output.times[2:] == (None, None)


def test_no_tokens_asked_for():
    engine = make_engine(clock=Clock())
    engine.add(request("nothing", max_tokens=0))
    engine.add(request("scored", max_tokens=0, prompt_logprobs=0))
    done = run(engine)
    assert done["nothing"].times[1:] == (None, None, None)
    assert None not in done["scored"].times


def test_a_step_that_was_cut_short_keeps_the_order(monkeypatch):
    clock = Clock()
    engine = make_engine(clock=clock, async_scheduling=True)
    engine.add(request())
    gather = Outbox.gather
    monkeypatch.setattr(Outbox, "gather", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.setattr(Outbox, "gather", gather)
    output = run(engine)["a"]
    assert len(output.outputs) == 1
    assert None not in output.times
    assert in_order(output)


def test_outputs_that_differ_in_time_alone_are_equal():
    def last(clock):
        engine = make_engine(clock=clock)
        engine.add(request())
        return run(engine)["a"]

    slow = Clock()
    slow.ticks = itertools.count(1, 1000)
    one, other = last(Clock()), last(slow)
    assert one.times != other.times
    assert one == other
