import threading

import pytest

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.request import Request
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.schedule.observer import StepRecord
from jaxserve.seeds import derive_seed
from tests.fakes import (
    FakeExecutor,
    FakeHandle,
    drain,
    expected_beams,
    expected_tokens,
    make_engine,
    next_token,
)
from tests.replicas.replicated import SlowExecutor, ids_of, make_replicated, replica_of


class GoneError(RuntimeError):
    """A device fails."""


def request(name: str, prompt: list[int], max_tokens: int = 6, **fields) -> Request:
    params = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0} | fields.pop(
        "params", {}
    )
    return Request(
        id=name, prompt_token_ids=prompt, sampling_params=SamplingParams(**params), **fields
    )


def prompt_of(number: int, length: int = 9) -> list[int]:
    return [10 * number + i for i in range(length)]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_tokens_are_those_of_one_engine_whichever_replica_makes_them(num_replicas):
    engine = make_replicated(num_replicas)
    for i in range(10):
        engine.add(request(str(i), prompt_of(i, 3 + i), max_tokens=4 + i % 5))
    used = {replica_of(engine, str(i)) for i in range(10)}
    assert used == set(range(num_replicas))
    parts = drain(engine)  # type: ignore[arg-type]
    for i in range(10):
        assert ids_of(parts, str(i)) == expected_tokens(prompt_of(i, 3 + i), 4 + i % 5)
        assert parts[str(i)][-1].finished


def test_draws_without_a_seed_are_those_that_one_engine_makes():
    engine = make_replicated(2, draws=True, seed=5)
    for i in range(6):
        engine.add(request(str(i), prompt_of(i), params={"temperature": 1.0}))
    parts = drain(engine)  # type: ignore[arg-type]
    for i in range(6):
        expected = expected_tokens(prompt_of(i), 6, seed=derive_seed(5, i))
        assert ids_of(parts, str(i)) == expected


def test_a_replica_goes_on_while_another_one_is_slow():
    gate = threading.Event()

    class Stuck(FakeHandle):
        def is_ready(self):
            return gate.is_set()

        def wait(self):
            gate.wait(60)

    class StuckExecutor(FakeExecutor):
        def submit(self, batch):
            handle = super().submit(batch)
            return Stuck(handle._sampled, handle._run)

    engine = make_replicated(2, SlowExecutor)
    engine.engines[0].executor = engine.engines[0]._loop.executor = StuckExecutor(
        num_pages=64, page_size=4
    )
    engine.add(request("slow", prompt_of(1)))
    engine.add(request("quick", prompt_of(2)))
    assert replica_of(engine, "slow") == 0
    released = []
    while not (released and released[-1].finished):
        released += engine.step()
    assert {part.request_id for part in released} == {"quick"}
    gate.set()
    parts = drain(engine)  # type: ignore[arg-type]
    assert ids_of(parts, "slow") == expected_tokens(prompt_of(1), 6)


def test_steps_are_sent_to_all_before_the_first_is_waited_for():
    engine = make_replicated(2)
    executors: list[SlowExecutor] = [one.executor for one in engine.engines]  # type: ignore[misc]
    sent_then = []

    class Watching(SlowExecutor):
        def submit(self, batch):
            handle = super().submit(batch)
            taken = handle.result

            def result():
                sent_then.append([one.num_submitted for one in executors])
                return taken()

            handle.result = result
            return handle

    for one in executors:
        one.__class__ = Watching
    for i in range(2):
        engine.add(request(str(i), prompt_of(i)))
    engine.step()
    assert min(sent_then[0]) >= 1


def test_a_request_follows_the_prefix_that_a_replica_has_cached():
    engine = make_replicated(3)
    shared = prompt_of(1, 60)
    engine.add(request("filler", prompt_of(30, 20)))
    engine.add(request("first", [*shared, 1]))
    place = replica_of(engine, "first")
    drain(engine)  # type: ignore[arg-type]
    engine.add(request("second", [*shared, 2]))
    assert place == 1
    assert replica_of(engine, "second") == place
    (last,) = drain(engine)["second"][-1:]  # type: ignore[arg-type]
    assert last.num_cached_tokens == 60
    assert engine.reset_prefix_cache() > 0


def test_forks_and_aborts_find_their_request_and_ids_are_unique_among_all():
    engine = make_replicated(2)
    engine.add(request("a", prompt_of(1), hold=True))
    engine.add(request("b", prompt_of(2), hold=True))
    assert (replica_of(engine, "a"), replica_of(engine, "b")) == (0, 1)
    for name in ("a", "b"):
        with pytest.raises(InvalidRequestError, match="already in flight or held"):
            engine.add(request(name, prompt_of(3)))
    drain(engine)  # type: ignore[arg-type]
    assert not engine.has_request("b")
    with pytest.raises(InvalidRequestError, match="already in flight or held"):
        engine.add(request("b", prompt_of(3)))  # held
    with pytest.raises(InvalidRequestError, match="already in flight or held"):
        engine.fork("a", "b")
    engine.fork("b", "c", append_token_ids=[5], sampling_params=SamplingParams(max_tokens=3))
    assert replica_of(engine, "c") == 1
    known = [*prompt_of(2), *expected_tokens(prompt_of(2), 6), 5]
    parts = drain(engine)  # type: ignore[arg-type]
    assert ids_of(parts, "c") == expected_tokens(known, 3)
    assert engine.abort("a") is None
    assert engine.abort("b") is None  # lets go
    with pytest.raises(InvalidRequestError, match="neither in flight nor held"):
        engine.fork("b", "d")
    assert engine.abort("nobody") is None
    engine.check_invariants()


def test_an_aborted_request_hands_out_that_it_ended_and_gives_back_its_work():
    engine = make_replicated(2)
    for i in range(4):
        engine.add(request(str(i), prompt_of(i), max_tokens=50))
    for _ in range(3):
        engine.step()
    for i in range(4):
        output = engine.abort(str(i))
        assert output is not None
        assert output.outputs[0].finish_reason == "abort"
        engine.check_invariants()
    drain(engine)  # type: ignore[arg-type]
    assert not engine.has_work()
    assert engine.stats().num_owned_pages == 0


def test_beams_choices_and_requests_for_nothing_pass_through():
    engine = make_replicated(2)
    beam = BeamParams(beam_width=3, max_tokens=5)
    engine.add(Request(id="beam", prompt_token_ids=prompt_of(1), beam=beam))
    engine.add(request("several", prompt_of(2), params={"n": 3}))
    engine.add(request("nothing", prompt_of(3), max_tokens=0))
    parts = drain(engine)  # type: ignore[arg-type]
    for index, (ids, *_) in enumerate(expected_beams(prompt_of(1), beam)):
        assert ids_of(parts, "beam", index) == ids
    for index in range(3):
        assert ids_of(parts, "several", index) == expected_tokens(prompt_of(2), 6)
    assert parts["nothing"][-1].finished


@pytest.mark.parametrize("prompt", [[], [-1], [2**31], [10**6], ["a"], "text", None])
def test_a_bad_prompt_is_refused_as_one_engine_refuses_it(prompt):
    def refusal(engine) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            engine.add(Request(id="a", prompt_token_ids=prompt))  # type: ignore[arg-type]
        return caught.value.message

    engine = make_replicated(2)
    assert refusal(engine) == refusal(make_engine())
    assert not engine.has_work()
    engine.check_invariants()


def test_new_weights_reach_every_replica():
    engine = make_replicated(2)
    for i in range(4):
        engine.add(request(str(i), prompt_of(i), max_tokens=3))
    engine.update_params(7)
    assert [one.executor.weights for one in engine.engines] == [7, 7]  # type: ignore[attr-defined]
    parts = drain(engine)  # type: ignore[arg-type]
    for i in range(4):
        ids = ids_of(parts, str(i))
        context = prompt_of(i)
        for token in ids:
            assert token == next_token([one + 7 for one in context])
            context = [*context, token]


def test_all_replicas_sleep_and_wake_or_none_does():
    engine = make_replicated(2)
    for i in range(4):
        engine.add(request(str(i), prompt_of(i)))
    engine.step()
    engine.engines[1].update_params(1, mode="finish_old")
    with pytest.raises(ConfigError, match="still to end with the weights in use"):
        engine.sleep(level=2)
    assert not engine.is_asleep
    engine.sleep()
    assert engine.is_asleep
    assert not engine.has_work() or engine.step()
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.step()
    engine.wake()
    parts = drain(engine)  # type: ignore[arg-type]
    assert all(part[-1].finished for part in parts.values())
    assert len(parts) == 4


def test_a_replica_that_fails_loses_nothing_of_the_others():
    class Failing(SlowExecutor):
        is_broken = False

        def submit(self, batch):
            if self.is_broken:
                raise GoneError
            return super().submit(batch)

    engine = make_replicated(2, Failing)
    for i in range(4):
        engine.add(request(str(i), prompt_of(i)))
    broken: Failing = engine.engines[1].executor  # type: ignore[assignment]
    engine.step()
    broken.is_broken = True
    parts: dict[str, list] = {}
    failures = 0
    for _ in range(40):
        try:
            for output in engine.step():
                parts.setdefault(output.request_id, []).append(output)
        except GoneError:
            failures += 1
            if failures == 3:
                broken.is_broken = False
        if not engine.has_work():
            break
    assert failures == 3
    for name in parts:
        expected = expected_tokens(prompt_of(int(name)), 6)
        assert ids_of(parts, name) == expected[-len(ids_of(parts, name)) :]
    assert len(parts) == 4
    engine.check_invariants()


def test_observers_see_the_steps_of_all_replicas():
    engine = make_replicated(2)
    seen: list[StepRecord] = []

    class Observer:
        num_changes = 0

        def step_done(self, step):
            seen.append(step)

        def weights_changed(self):
            self.num_changes += 1

    observer = Observer()
    engine.observers.append(observer)
    for i in range(4):
        engine.add(request(str(i), prompt_of(i)))
    drain(engine)  # type: ignore[arg-type]
    assert len(seen) == engine.stats().num_steps
    assert all(one.stats().num_steps for one in engine.engines)
    engine.update_params(1)
    assert observer.num_changes == 2
    engine.observers.remove(observer)
    engine.add(request("more", prompt_of(9)))
    drain(engine)  # type: ignore[arg-type]
    assert len(seen) < engine.stats().num_steps
