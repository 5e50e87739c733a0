import time

import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.errors import ConfigError, ProcessLostError
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.fakes import FakeExecutor, FakeHandle, drain, expected_tokens, make_engine
from tests.multihost.lines import Run


class Recording(FakeExecutor):
    """A follower's or leader's part: remembers its params too."""

    params: object = None
    num_resets = 0
    fails_at = -1

    def submit(self, batch):
        if self.num_steps == self.fails_at:
            raise RuntimeError("out of memory")
        return super().submit(batch)

    def prepare_params(self, params):
        if "bad" in params:
            raise ConfigError("params['bad']: expected nothing, found int32[1]")
        return params

    def use_params(self, prepared):
        self.params = prepared

    def reset(self):
        super().reset()
        self.num_resets += 1


def make_run(num_followers: int = 2, **options) -> tuple[Engine, Run]:
    """An engine whose steps run in all of them."""
    runs: list[Run] = []

    def make(**sizes):
        parts = [Recording(**sizes) for _ in range(num_followers)]
        runs.append(Run(parts, Recording(**sizes)))
        return runs[0].leader

    engine = make_engine(executor_class=make, **({"async_scheduling": True} | options))  # type: ignore[arg-type]
    return engine, runs[0]


def request(name: str, prompt: list[int], max_tokens: int = 6, **params) -> Request:
    params = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0} | params
    return Request(id=name, prompt_token_ids=prompt, sampling_params=SamplingParams(**params))


def step_until_it_raises(engine: Engine) -> None:
    for _ in range(40):
        engine.step()
        time.sleep(0.05)


def ids_of(parts: list) -> list[int]:
    return [i for part in parts for one in part.outputs for i in one.token_ids]


def test_followers_run_what_the_leader_runs():
    engine, run = make_run(num_pages=14)
    for i in range(8):
        engine.add(request(str(i), [*range(10 * i, 10 * i + 7)], presence_penalty=0.0))
    engine.add(request("masked", [3, 4, 5], allowed_token_ids=[7, 8, 9]))
    engine.add(request("penalised", [3, 4, 6], presence_penalty=1.0))
    parts = drain(engine)
    for i in range(8):
        assert ids_of(parts[str(i)]) == expected_tokens([*range(10 * i, 10 * i + 7)], 6)
    assert set(ids_of(parts["masked"])) <= {7, 8, 9}
    run.leader.close()
    run.join()
    assert run.ends == {1: None, 2: None}
    assert run.lost == {}
    for part in run.executors:
        assert part.num_steps == run.own.num_steps > 10
        assert (part.slots == run.own.slots).all()


def test_new_weights_arrive_whole_and_bad_ones_change_nothing():
    engine, run = make_run()
    params: dict = {
        "embed": {"embedding": np.arange(6, dtype=np.float32).reshape(2, 3)},
        "layers": {0: {"scale": np.arange(3, dtype=np.int8)}},
        "norm": np.ones(2),
    }
    with pytest.raises(ConfigError, match=r"params\['norm'\]: arrays of float64 cannot be sent"):
        engine.update_params(params)
    params["norm"] = np.ones(2, np.float32)
    engine.update_params(params)
    with pytest.raises(ConfigError, match="bad"):
        engine.update_params(params | {"bad": np.zeros(1, np.int32)})
    engine.add(request("a", [1, 2, 3]))
    assert ids_of(drain(engine)["a"]) == expected_tokens([1, 2, 3], 6)
    params["norm"] = np.full(2, 3, np.float32)
    engine.update_params(params)
    run.leader.close()
    run.join()
    for part in run.executors:
        found = part.params
        assert isinstance(found, dict)
        assert (found["embed"]["embedding"] == params["embed"]["embedding"]).all()
        assert (found["layers"][0]["scale"] == np.arange(3)).all()
        assert (found["norm"] == 3).all()


def test_all_processes_sleep_and_wake():
    engine, run = make_run()
    engine.add(request("a", [1, 2, 3], max_tokens=9))
    engine.step()
    engine.sleep()
    assert len(run.own.slots) == 0
    engine.wake()
    assert len(ids_of(drain(engine)["a"])) <= 9
    engine.add(request("b", [1, 2, 3]))
    assert ids_of(drain(engine)["b"]) == expected_tokens([1, 2, 3], 6)
    run.leader.close()
    run.join()
    assert run.ends == {1: None, 2: None}
    assert all((part.slots == run.own.slots).all() for part in run.executors)


def test_a_step_that_is_cut_short_before_it_is_told_is_computed_again_by_all():
    engine, run = make_run()
    engine.add(request("a", [1, 2, 3]))
    engine.step()
    engine._in_change = True  # as an interrupt between two calls of the executor leaves it
    assert len(ids_of(drain(engine)["a"])) < 6
    run.leader.close()
    run.join()
    assert [part.num_resets for part in run.executors] == [1, 1]
    assert run.ends == {1: None, 2: None}


def test_a_call_that_is_cut_short_between_two_processes_ends_the_run():
    engine, run = make_run()
    engine.add(request("a", [1, 2, 3]))

    tell = run.followers.tell

    def cut(kind, *arguments):
        tell(kind, *arguments)
        raise KeyboardInterrupt

    run.followers.tell = cut  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    run.followers.tell = tell  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(ProcessLostError, match="submit was cut short between two processes"):
            engine.step()
    run.leader.close()
    run.join()
    assert "cut short" in str(run.ends[1])


def test_a_leader_that_fails_where_its_followers_do_not_stops():
    engine, run = make_run()
    engine.add(request("a", [1, 2, 3], max_tokens=50))
    engine.step()
    assert isinstance(run.own, Recording)
    run.own.fails_at = run.own.num_steps
    with pytest.raises(RuntimeError, match="out of memory"):
        step_until_it_raises(engine)
    run.own.fails_at = -1
    with pytest.raises(
        ProcessLostError, match="submit failed in process 0: RuntimeError: out of memory"
    ):
        engine.step()
    run.leader.close()
    run.join()
    assert "failed in process 0" in str(run.ends[1])


def test_a_follower_that_fails_says_why_and_the_leader_stops():
    engine, run = make_run()
    run.executors[1].fails_at = 2
    engine.add(request("a", [1, 2, 3], max_tokens=50))
    with pytest.raises(
        ProcessLostError, match="process 2 of 3 failed: RuntimeError: out of memory"
    ):
        step_until_it_raises(engine)
    with pytest.raises(ProcessLostError, match="out of memory"):
        engine.step()
    run.leader.close()
    run.join()
    assert isinstance(run.ends[2], RuntimeError)
    assert "out of memory" in str(run.ends[1])


@pytest.mark.parametrize("hangs_in", ["submit", "result"])
def test_a_follower_that_is_gone_ends_a_call_that_would_never_end(hangs_in):
    engine, run = make_run(num_followers=1)

    class Never(FakeHandle):
        def result(self):
            time.sleep(1000)

    submit = run.own.submit

    def stuck(batch):
        handle = submit(batch)
        run.wires[0].close()
        if hangs_in == "submit":
            time.sleep(1000)
        return Never(handle._sampled, handle._run)

    run.own.submit = stuck  # type: ignore[method-assign]
    engine.add(request("a", [1, 2, 3]))
    with pytest.raises(ProcessLostError, match="process 1 of 2 is gone"):
        engine.step()
    run.join()
    assert isinstance(run.ends[1], ProcessLostError)


def test_a_leader_that_is_gone_is_told_at_once_even_where_a_step_hangs():
    engine, run = make_run(num_followers=1)
    engine.add(request("a", [1, 2, 3], max_tokens=50))
    engine.step()
    run.followers._wires[1].close()
    run.join()
    assert "the leader, is gone" in run.lost[1]
    assert isinstance(run.ends[1], ProcessLostError)
    with pytest.raises(ProcessLostError, match="process 1 of 2 is gone"):
        step_until_it_raises(engine)


def test_what_a_follower_does_not_know_ends_it():
    _, run = make_run(num_followers=1)
    run.followers.tell("dance")
    run.join()
    assert "told 'dance'" in str(run.ends[1])
    deadline = time.monotonic() + 10
    while run.followers.fault is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(ProcessLostError, match="'dance'"):
        run.followers.tell("reset")
