"""Requests through an engine over a fake device, and what happened in each step."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxserve.engine import Engine
from jaxserve.request import Request, RequestOutput, merge_outputs
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule import sequence
from tests.fakes import expected_tokens


def request(name: str, prompt: Sequence[int], max_tokens: int, n: int = 1, **fields) -> Request:
    """Greedy, and never ended by a token."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, n=n)
    return Request(id=name, prompt_token_ids=list(prompt), sampling_params=params, **fields)


def token_ids(parts: list[RequestOutput]) -> list[int]:
    return merge_outputs(parts).outputs[0].token_ids


@dataclass
class Run:
    """An engine driven step by step, every invariant checked after each.

    Args:
        engine: over a `FakeExecutor`.
        after_step: called after each step.
    """

    engine: Engine
    after_step: Callable[[], None] = lambda: None
    requests: dict[str, Request] = field(default_factory=dict)
    parts: dict[str, list[RequestOutput]] = field(default_factory=dict)
    steps: dict[str, list[int]] = field(default_factory=dict)  # in which it released something
    added_at: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0

    def add(self, name: str, prompt: Sequence[int], max_tokens: int, **fields) -> None:
        one = request(name, prompt, max_tokens, **fields)
        self.engine.add(one)
        self.requests[name], self.added_at[name] = one, self.num_steps
        self.engine.check_invariants()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.engine.step():
                self.parts.setdefault(output.request_id, []).append(output)
                self.steps.setdefault(output.request_id, []).append(self.num_steps)
            self.num_steps += 1
            self.engine.check_invariants()
            self.after_step()

    def drain(self, max_steps: int = 5000) -> None:
        begin = self.num_steps
        while self.engine.has_work():
            assert self.num_steps < begin + max_steps, f"not done after {max_steps} steps"
            self.step()

    def abort(self, name: str) -> None:
        self.engine.abort(name)
        self.requests.pop(name, None)
        self.engine.check_invariants()

    def check_outputs(self) -> None:
        """Every choice of every request got what it gets alone in an empty pool."""
        num_slots = self.engine.scheduler.kv.num_slots
        for name, one in self.requests.items():
            params, prompt = one.sampling_params, one.prompt_token_ids
            num_tokens = min(params.max_tokens or 0, num_slots - len(prompt) + 1)
            expected = expected_tokens(prompt, num_tokens)
            found = [choice.token_ids for choice in merge_outputs(self.parts[name]).outputs]
            assert found == [expected] * params.n, f"request {name}"

    def check_all_pages_are_back(self) -> None:
        """Nothing is owned any more, on the device or on the host."""
        kv = self.engine.scheduler.kv
        assert kv.num_owned_pages == 0
        assert kv.host.num_free == kv.host.num_pages
        kv.clear_cache()
        assert kv.pool.num_free == kv.pool.num_usable

    def ids_running(self) -> list[str]:
        return [seq.request.id for seq in self.engine.scheduler.running]

    def ids_waiting(self) -> list[str]:
        return [seq.request.id for seq in self.engine.scheduler.waiting]

    def sequences(self) -> list[sequence.Sequence]:
        """All that the scheduler has, the oldest first."""
        scheduler = self.engine.scheduler
        everyone = (*scheduler.running, *scheduler.waiting, *scheduler.held)
        return sorted(everyone, key=lambda seq: seq.order)

    def sequence(self, name: str) -> sequence.Sequence:
        (found,) = [seq for seq in self.sequences() if seq.request.id == name]
        return found

    def gap(self, name: str) -> int:
        """The most steps between two releases of a request, or before the first."""
        steps = [self.added_at[name] - 1, *self.steps[name]]
        return max(b - a for a, b in itertools.pairwise(steps))
