"""The engine's lock: it is given back whatever happens while a call begins or ends."""

import itertools
import linecache
import sys

import pytest

from jaxserve.request import Request, SamplingParams
from tests.fakes import drain, make_engine

CALLS = {
    "add": lambda engine: engine.add(Request(id="new", prompt_token_ids=[1, 2])),
    "fork": lambda engine: engine.fork("1", "new"),
    "abort": lambda engine: engine.abort("1"),
    "update_params": lambda engine: engine.update_params(7),
    "finish_old": lambda engine: engine.update_params(7, mode="finish_old"),
    "abort_all": lambda engine: engine.update_params(7, mode="abort"),
    "sleep": lambda engine: engine.sleep(),
    "step": lambda engine: engine.step(),
}


class InterruptEngineAt:
    """Raises KeyboardInterrupt at the n-th line that runs of the engine itself, not counting those
    that begin or end a `with` or a `try`: between the instructions of one Python looks for signals
    only after a call.
    """

    def __init__(self, count: int):
        self.count = count

    def __call__(self, frame, event, argument):
        return self.line if frame.f_code.co_filename.endswith("/jaxserve/engine.py") else None

    def line(self, frame, event, argument):
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not text.strip().startswith(("with ", "try:")):
            self.count -= 1
            if self.count == 0:
                raise KeyboardInterrupt
        return self.line


@pytest.mark.parametrize("method", CALLS)
def test_an_interrupt_while_a_call_begins_or_ends_does_not_lock_the_engine(method):
    """Not even while it is handled: its traceback keeps every frame of the call alive."""
    for count in itertools.count(1):
        engine = make_engine(num_pages=11, max_num_batched_tokens=8)
        for name in "12":
            params = SamplingParams(max_tokens=6, temperature=0)
            prompt = range(3 * int(name))
            engine.add(Request(id=name, prompt_token_ids=prompt, sampling_params=params))
        engine.step()
        interrupt = InterruptEngineAt(count)
        sys.settrace(interrupt)
        try:
            CALLS[method](engine)
        except KeyboardInterrupt:
            sys.settrace(None)
            engine.abort("2")
        finally:
            sys.settrace(None)
        engine.wake()
        drain(engine)
        assert engine.stats().num_owned_pages == 0
        if interrupt.count > 0:
            break
    assert count > 5
