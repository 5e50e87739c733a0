"""An engine that is interrupted anywhere, or whose device fails, goes on without losing a token or a page."""

import itertools
import sys
import threading

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.request import Request, SamplingParams, merge_outputs
from tests.fakes import FakeExecutor, drain, expected_tokens, make_engine
from tests.llms import greedy, shared_llm

PROMPTS = {str(i): [100 * i + j for j in range(3 + 2 * i)] for i in range(4)}
NUM_TOKENS = 12
# Interrupted here, a call has done its work but not told its caller yet: nobody can know better.
HANDING_OUT = {"step", "_exclusive", "__enter__", "__exit__", "abort", "add"}


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
