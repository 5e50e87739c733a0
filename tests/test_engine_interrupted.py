"""An engine that is interrupted anywhere, or whose device fails, goes on without losing a token or a page."""

import itertools
import sys
import threading

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.request import Request, SamplingParams, merge_outputs
from jaxserve.sampling_params import BeamParams
from jaxserve.seeds import choice_seed
from tests.fakes import FakeExecutor, drain, expected_beams, expected_tokens, make_engine
from tests.llms import greedy, shared_llm

PROMPTS = {str(i): [100 * i + j for j in range(3 + 2 * i)] for i in range(4)}
NUM_TOKENS = 12
# Interrupted here, a call has done its work but not told its caller yet: nobody can know better.
HANDING_OUT = {"step", "_exclusive", "__enter__", "__exit__", "abort", "add", "fork"}


def busy_engine():
    """Four requests in a pool that is too small for them, in the middle of their work."""
    engine = make_engine(num_pages=11, page_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    for name, prompt in PROMPTS.items():
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=True)
        engine.add(Request(id=name, prompt_token_ids=prompt, sampling_params=params))
    parts = {name: [] for name in PROMPTS}
    for _ in range(6):
        for output in engine.step():
            parts[output.request_id].append(output)
    return engine, parts


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line that runs inside the engine's own rooms."""

    def __init__(self, count: int):
        self.count = count
        self.fired = False

    def __call__(self, frame, event, argument):
        name = frame.f_code.co_filename
        inside = "/jaxserve/" in name and frame.f_code.co_name not in HANDING_OUT
        return self.line if inside else None

    def line(self, frame, event, argument):
        if event == "line":
            self.count -= 1
            if self.count == 0:
                self.fired = True
                raise KeyboardInterrupt
        return self.line


def test_an_interrupt_at_any_line_of_a_step_loses_nothing():
    for count in itertools.count(1, 3):
        engine, parts = busy_engine()
        interrupt = InterruptAt(count)
        sys.settrace(interrupt)
        try:
            for output in engine.step():
                parts[output.request_id].append(output)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        for name, more in drain(engine).items():
            parts[name] += more
        for name, prompt in PROMPTS.items():
            whole = merge_outputs(parts[name]).outputs[0]
            assert whole.token_ids == expected_tokens(prompt, NUM_TOKENS), f"line {count}"
            assert len(whole.logprobs) == NUM_TOKENS
            assert whole.finish_reason == "length"
        assert engine.stats().num_owned_pages == 0
        if not interrupt.fired:
            assert count > 100
            return


@pytest.mark.parametrize("method", ["add", "abort"])
def test_an_interrupt_at_any_line_of_add_or_abort_leaves_a_working_engine(method):
    """The request of the interrupted call is there or it is not; the others are not disturbed."""
    for count in itertools.count(1):
        engine, parts = busy_engine()
        params = SamplingParams(max_tokens=3, temperature=0)
        new = Request(id="new", prompt_token_ids=[7, 8], sampling_params=params)
        interrupt = InterruptAt(count)
        sys.settrace(interrupt)
        try:
            engine.add(new) if method == "add" else engine.abort("1")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        others = [name for name in PROMPTS if method == "add" or name != "1"]
        for name, more in drain(engine).items():
            parts.setdefault(name, []).extend(more)
        for name in others:
            whole = merge_outputs(parts[name]).outputs[0]
            assert whole.token_ids == expected_tokens(PROMPTS[name], NUM_TOKENS), f"line {count}"
        if "new" in parts:
            assert merge_outputs(parts["new"]).outputs[0].token_ids == expected_tokens([7, 8], 3)
        assert engine.stats().num_owned_pages == 0
        if not interrupt.fired:
            assert count > 5
            return


class Family:
    """Requests of every kind in a pool that is too small for them: choices, a held root with two
    branches, a beam search. `check` knows what has to come out of them."""

    CHOICES = SamplingParams(n=3, seed=4, max_tokens=7, logprobs=True, ignore_eos=True)
    HELD = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    BEAM = BeamParams(beam_width=3, max_tokens=6)

    def __init__(self, num_steps: int):
        self.engine = make_engine(
            draws=True,
            num_pages=13,
            page_size=4,
            max_num_seqs=5,
            max_num_batched_tokens=12,
            num_host_pages=5,
        )
        self.parts: dict[str, list] = {}
        root = list(range(6))
        self.engine.add(
            Request(id="root", prompt_token_ids=root, sampling_params=self.HELD, hold=True)
        )
        self.take(drain(self.engine))
        self.engine.add(
            Request(id="choices", prompt_token_ids=[1] * 9, sampling_params=self.CHOICES)
        )
        self.engine.add(Request(id="beams", prompt_token_ids=[2] * 7, beam=self.BEAM))
        self.engine.fork("root", "left", append_token_ids=[50], sampling_params=self.HELD)
        self.engine.fork("root", "right", num_tokens=7, sampling_params=self.HELD, hold=True)
        self.expected = {
            "root": [expected_tokens(root, 5)],
            "left": [expected_tokens([*root, *expected_tokens(root, 5), 50], 5)],
            "right": [expected_tokens([*root, *expected_tokens(root, 1)], 5)],
            "choices": [expected_tokens([1] * 9, 7, choice_seed(4, i)) for i in range(3)],
            "beams": [ids for ids, _, _ in expected_beams([2] * 7, self.BEAM)],
        }
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        for output in self.engine.step():
            self.parts.setdefault(output.request_id, []).append(output)

    def take(self, more: dict[str, list]) -> None:
        for name, parts in more.items():
            self.parts.setdefault(name, []).extend(parts)

    def finish(self) -> None:
        self.take(drain(self.engine))

    def check(self, *without: str) -> None:
        """Everything came out once, but perhaps of these; nothing is left behind."""
        for name in self.expected.keys() - set(without):
            parts = self.parts[name]
            outputs = merge_outputs(parts).outputs
            assert [one.token_ids for one in outputs] == self.expected[name], name
            ends = [c.index for part in parts for c in part.outputs if c.finish_reason]
            assert sorted(ends) == list(range(len(outputs))), "a choice ended twice"
            assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        if "choices" not in without:
            outputs = merge_outputs(self.parts["choices"]).outputs
            assert [len(one.logprobs) for one in outputs] == [7] * 3
        for name in ("root", "right"):
            if name not in without:  # held, so it can be forked
                self.engine.fork(name, f"of {name}", num_tokens=8, sampling_params=self.HELD)
        self.finish()
        for name in self.expected:
            self.engine.abort(name)
        self.engine.check_invariants()
        assert self.engine.stats().num_owned_pages == 0


def interrupted_at(count: int, call) -> bool:
    """Whether the call was long enough to be interrupted at its line number `count`."""
    interrupt = InterruptAt(count)
    sys.settrace(interrupt)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return interrupt.fired


# The choices spread in the second step; beams are chosen in all of them and held in some.
@pytest.mark.parametrize("num_steps", [0, 1, 4, 6])
def test_an_interrupt_at_any_line_loses_no_choice_no_beam_and_no_branch(num_steps):
    for count in itertools.count(1 + 7 * num_steps, 29):  # other lines in each of them
        family = Family(num_steps)
        fired = interrupted_at(count, family.step)
        family.finish()
        family.check()
        if not fired:
            assert count > 500
            return


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["schedule", "update", "fork", "hold", "resume", "finish"])
def test_an_interrupt_around_any_call_of_the_scheduler_loses_nothing(method, after):
    """The n-th such call of a whole life, for every n."""
    for count in itertools.count(1):
        family = Family(0)
        scheduler = family.engine.scheduler
        working, calls = getattr(scheduler, method), itertools.count(1)

        def cut_short(*arguments, working=working, calls=calls, count=count):
            is_now = next(calls) == count
            if is_now and not after:
                raise KeyboardInterrupt
            result = working(*arguments)
            if is_now:
                raise KeyboardInterrupt
            return result

        setattr(scheduler, method, cut_short)
        fired = False
        while family.engine.has_work():
            try:
                family.step()
            except KeyboardInterrupt:
                fired = True
        setattr(scheduler, method, working)
        family.check()
        if not fired:
            assert count > 3
            return


@pytest.mark.parametrize(
    ("name", "index"),
    [("choices", None), ("choices", 0), ("choices", 2), ("beams", None), ("root", None)],
)
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_interrupt_at_any_line_of_an_abort_harms_nobody_else(num_steps, name, index):
    for count in itertools.count(1 + num_steps, 13):
        family = Family(num_steps)
        fired = interrupted_at(count, lambda family=family: family.engine.abort(name, index))
        family.finish()
        parts = [part for part in family.parts.get(name, []) if name != "root"]
        ends = [c.index for part in parts for c in part.outputs if c.finish_reason]
        assert len(ends) == len(set(ends)), "a choice ended twice"
        assert not any(part.finished for part in parts[:-1])
        family.check(name)
        if not fired:
            return


@pytest.mark.parametrize("method", ["add", "fork", "update_params"])
def test_an_interrupt_at_any_line_of_other_calls_leaves_a_working_engine(method):
    for count in itertools.count(1, 11):
        family = Family(2)
        engine = family.engine

        def call(engine=engine, held=family.HELD):
            if method == "add":
                params = SamplingParams(n=2, max_tokens=3, temperature=0)
                engine.add(Request(id="new", prompt_token_ids=[7, 8], sampling_params=params))
            elif method == "fork":
                engine.fork("root", "new", num_tokens=7, sampling_params=held)
            else:
                engine.update_params(0)

        fired = interrupted_at(count, call)
        family.finish()
        family.check()
        if "new" in family.parts:
            new = merge_outputs(family.parts["new"]).outputs
            expected = (
                family.expected["right"] if method == "fork" else [expected_tokens([7, 8], 3)] * 2
            )
            assert [one.token_ids for one in new] == expected
        if not fired:
            assert count > 20
            return


@pytest.mark.parametrize("where", ["submit", "result"])
def test_a_device_failure_is_raised_and_the_next_step_goes_on(where):
    engine, parts = busy_engine()
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    working = executor.submit

    class Broken:
        def result(self):
            raise OSError("device lost")

    def fail(batch):
        executor.slots[:] = 7777  # whatever the pages hold now, it is wrong
        if where == "submit":
            raise OSError("device lost")
        return Broken()

    executor.submit = fail
    with pytest.raises(OSError, match="device lost"):
        engine.step()
    executor.submit = working
    for name, more in drain(engine).items():
        parts[name] += more
    for name, prompt in PROMPTS.items():
        assert merge_outputs(parts[name]).outputs[0].token_ids == expected_tokens(
            prompt, NUM_TOKENS
        )


def test_abort_and_add_work_after_an_interrupt_too():
    engine, _ = busy_engine()
    engine.executor.submit = lambda batch: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    del engine.executor.submit
    for name in PROMPTS:
        assert engine.abort(name).outputs[0].finish_reason == "abort"
    engine.check_invariants()
    assert not engine.has_work()


def test_a_second_thread_is_refused_and_does_no_harm():
    engine, parts = busy_engine()
    inside, leave = threading.Event(), threading.Event()
    working = engine.executor.submit

    def slow(batch):
        inside.set()
        leave.wait(20)
        return working(batch)

    engine.executor.submit = slow
    outputs = []
    thread = threading.Thread(target=lambda: outputs.extend(engine.step()))
    thread.start()
    assert inside.wait(20)
    params = SamplingParams(max_tokens=1)
    for call in (
        engine.step,
        lambda: engine.abort("0"),
        lambda: engine.add(Request(id="x", prompt_token_ids=[1], sampling_params=params)),
    ):
        with pytest.raises(RuntimeError, match="another thread"):
            call()
    leave.set()
    thread.join(20)
    engine.executor.submit = working
    for output in outputs:
        parts[output.request_id].append(output)
    for name, more in drain(engine).items():
        parts[name] += more
    for name, prompt in PROMPTS.items():
        assert merge_outputs(parts[name]).outputs[0].token_ids == expected_tokens(
            prompt, NUM_TOKENS
        )


@pytest.mark.parametrize("call", [1, 2, 3, 5])
def test_the_device_s_pages_survive_an_interrupt_between_its_programs(call):
    """Pages are donated to each program in turn; cut short, some of them are gone."""
    llm = shared_llm()
    alone = llm.generate([[5] * 40], greedy(6))[0].outputs[0]
    programs = llm.engine.executor._programs
    lookup, count = type(programs).__getitem__, itertools.count(1)

    class Interrupting(type(programs)):
        def __getitem__(self, key):
            program = lookup(self, key)

            def run(*arguments):
                outputs = program(*arguments)
                if next(count) == call:
                    raise KeyboardInterrupt
                return outputs

            return run

    programs.__class__ = Interrupting
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5] * 40], greedy(6))
    finally:
        programs.__class__ = Interrupting.__base__
    again = llm.generate([[5] * 40], greedy(6))[0].outputs[0]
    assert again.token_ids == alone.token_ids
    llm.engine.check_invariants()


def test_an_id_list_may_be_changed_after_add():
    engine = make_engine()
    prompt = [5, 6, 7]
    params = SamplingParams(max_tokens=3, temperature=0)
    engine.add(Request(id="a", prompt_token_ids=prompt, sampling_params=params))
    prompt += [9, 9]
    assert merge_outputs(drain(engine)["a"]).outputs[0].token_ids == expected_tokens([5, 6, 7], 3)


def test_requests_for_no_tokens_are_in_flight_until_handed_out():
    engine = make_engine()
    nothing = SamplingParams(max_tokens=0)
    request = Request(id="z", prompt_token_ids=[1], sampling_params=nothing)
    engine.add(request)
    with pytest.raises(InvalidRequestError, match="already in flight"):
        engine.add(request)
    assert engine.abort("z").finished
    assert not engine.has_work()
    engine.add(request)
    (output,) = engine.step()
    assert (output.request_id, output.outputs[0].token_ids) == ("z", [])
    assert not engine.has_work()
