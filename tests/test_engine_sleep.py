"""`Engine.sleep` and `wake` over the fake device: it has no pages meanwhile, and at level 2 no weights."""

import itertools

import pytest

from jaxserve.errors import ConfigError
from jaxserve.request import Request, merge_outputs
from jaxserve.sampling_params import BeamParams, SamplingParams
from tests.fakes import drain, expected_beams, expected_tokens, make_engine, next_token

PROMPT = list(range(10))


def busy_engine(num_steps, **options):
    """An engine with requests of several kinds, and what they have released."""
    engine = make_engine(num_pages=40, num_host_pages=8, **options)
    params = SamplingParams(max_tokens=8, temperature=0)
    engine.add(Request(id="a", prompt_token_ids=PROMPT, sampling_params=params))
    several = SamplingParams(max_tokens=5, temperature=1, seed=3, n=2)
    engine.add(Request(id="several", prompt_token_ids=[3, 4], sampling_params=several))
    beam = BeamParams(beam_width=2, max_tokens=5, ignore_eos=True)
    engine.add(Request(id="beams", prompt_token_ids=[5, 6, 7], beam=beam))
    engine.add(Request(id="held", prompt_token_ids=[8], sampling_params=params, hold=True))
    parts = {}
    for _ in range(num_steps):
        collect(parts, engine.step())
    return engine, parts


def collect(parts, outputs):
    for output in outputs:
        parts.setdefault(output.request_id, []).append(output)


def finish(engine, parts):
    for more in drain(engine).values():
        collect(parts, more)
    return {name: merge_outputs(some) for name, some in parts.items()}


@pytest.mark.parametrize("is_async", [False, True], ids=["alone", "ahead"])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
def test_those_in_flight_go_on_as_if_nothing_had_been(num_steps, is_async):
    options = {"draws": True, "async_scheduling": is_async}
    undisturbed = finish(*busy_engine(num_steps, **options))
    engine, parts = busy_engine(num_steps, **options)
    engine.sleep()
    engine.check_invariants()
    assert engine.is_asleep
    assert len(engine.executor.slots) == len(engine.executor.host_slots) == 0
    assert engine.stats().is_asleep
    assert engine.stats().num_free_pages == 39
    collect(parts, engine.step() if engine.has_work() else [])  # what the last step released
    assert not engine.has_work()
    with pytest.raises(RuntimeError, match=r"Engine.step: the engine sleeps; wake\(\) has to come"):
        engine.step()
    engine.wake()
    assert not engine.is_asleep
    assert finish(engine, parts) == undisturbed
    assert undisturbed["a"].outputs[0].token_ids == expected_tokens(PROMPT, 8)


def test_who_comes_meanwhile_waits_and_may_leave():
    engine, parts = busy_engine(2)
    engine.sleep()
    params = SamplingParams(max_tokens=3, temperature=0)
    for name in ("new", "leaves"):
        engine.add(Request(id=name, prompt_token_ids=[9, 9], sampling_params=params))
    engine.fork("a", "branch", num_tokens=5, sampling_params=params)
    assert engine.abort("leaves").outputs[0].finish_reason == "abort"
    assert engine.abort("several").finished
    engine.check_invariants()
    engine.wake()
    outputs = finish(engine, parts)
    assert outputs["new"].outputs[0].token_ids == expected_tokens([9, 9], 3)
    assert outputs["branch"].outputs[0].token_ids == expected_tokens(PROMPT[:5], 3)
    assert "leaves" not in outputs


def test_weights_that_were_given_up_have_to_come_back_first():
    engine, parts = busy_engine(3)
    engine.sleep(level=1)
    engine.sleep(level=2)
    engine.sleep(level=1)  # the deeper one counts
    assert engine.executor.weights is None
    with pytest.raises(RuntimeError, match="gave the weights up; update_params has to come first"):
        engine.wake()
    with pytest.raises(
        ConfigError, match=r"'finish_old': sleep\(level=2\) gave the old weights up"
    ):
        engine.update_params(5, mode="finish_old")
    assert engine.update_params(5) == 1
    assert engine.is_asleep
    engine.wake()
    one = finish(engine, parts)["a"].outputs[0]
    tokens = list(PROMPT)
    for token, version in zip(one.token_ids, one.weights_versions, strict=True):
        assert token == next_token([i + 5 * version for i in tokens])
        tokens.append(token)
    assert set(one.weights_versions) == {0, 1}


def test_old_weights_that_are_still_wanted_are_not_given_up():
    engine, _ = busy_engine(2)
    engine.update_params(5, mode="finish_old")
    with pytest.raises(ConfigError, match="level=2: requests are still to end with the weights"):
        engine.sleep(level=2)
    assert not engine.is_asleep
    engine.sleep()
    engine.wake()
    assert finish(engine, {})["a"].outputs[0].weights_versions[-1] == 0
    assert engine.executor.weights == 5


@pytest.mark.parametrize("level", [0, 3, True, "1", None])
def test_no_such_level(level):
    engine = make_engine()
    with pytest.raises(ConfigError, match=r"level must be one of \(1, 2\), got"):
        engine.sleep(level=level)
    assert not engine.is_asleep


def test_to_wake_an_engine_that_is_awake_changes_nothing():
    engine, parts = busy_engine(3)
    cached = engine.stats().num_owned_pages
    engine.wake()
    assert engine.stats().num_owned_pages == cached > 0
    finish(engine, parts)


def test_one_that_has_no_memory_to_wake_sleeps_on(monkeypatch):
    engine, parts = busy_engine(3)
    engine.sleep()

    def full():
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "reset", full)
        with pytest.raises(MemoryError):
            engine.wake()
        assert engine.is_asleep
        params = SamplingParams(max_tokens=3, temperature=0)
        engine.add(Request(id="new", prompt_token_ids=[9], sampling_params=params))
    assert len(engine.executor.slots) == 0
    engine.wake()
    outputs = finish(engine, parts)
    assert outputs["a"].outputs[0].token_ids == expected_tokens(PROMPT, 8)
    assert [one.token_ids for one in outputs["beams"].outputs] == [
        ids for ids, *_ in expected_beams([5, 6, 7], engine_beam())
    ]


def engine_beam():
    return BeamParams(beam_width=2, max_tokens=5, ignore_eos=True)


@pytest.mark.parametrize("method", ["sleep", "wake", "update"])
def test_an_interrupt_at_any_call_of_the_scheduler_or_executor_loses_nothing(method, monkeypatch):
    undisturbed = finish(*busy_engine(3))
    for count in itertools.count(1):
        engine, parts = busy_engine(3)
        if method == "wake":
            engine.sleep()
        calls = itertools.count(1)
        fired = []

        def interrupting(function, calls=calls, fired=fired, count=count):
            def call(*arguments, **named):
                if next(calls) == count:
                    fired.append(True)
                    raise KeyboardInterrupt
                return function(*arguments, **named)

            return call

        with monkeypatch.context() as patch:
            for owner, name in (
                *((engine.executor, name) for name in ("release", "reset", "use_params")),
                *((engine.scheduler.parked, name) for name in ("give_up_pages",)),
                *((engine.scheduler.kv, name) for name in ("free", "clear_cache")),
            ):
                patch.setattr(owner, name, interrupting(getattr(owner, name)))
            try:
                if method == "update":
                    engine.update_params(0)
                else:
                    getattr(engine, method)()
            except KeyboardInterrupt:
                assert fired
        engine.wake()
        outputs = finish(engine, parts)
        assert outputs == undisturbed
        if not fired:
            assert count > 1
            return
