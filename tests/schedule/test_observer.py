"""Those who look on at an engine's steps: when they are called, and what happens when one fails."""

import pytest

from jaxserve.request import merge_outputs
from jaxserve.schedule.observer import StepRecord
from tests.fakes import drain, expected_tokens, make_engine
from tests.schedule.test_schedule_log import add, prompt_of


class Watching:
    """Keeps what it is told; fails at step `fails_at`."""

    def __init__(self, fails_at: int = -1):
        self.steps: list[StepRecord] = []
        self.num_changes = 0
        self.fails_at = fails_at

    def step_done(self, step: StepRecord) -> None:
        self.steps.append(step)
        if len(self.steps) == self.fails_at:
            raise OSError("disk full")

    def weights_changed(self) -> None:
        self.num_changes += 1


def test_every_step_is_told_once_with_what_it_took():
    clock = iter(range(1000))
    engine = make_engine(clock=lambda: next(clock))
    first, second = Watching(), Watching()
    engine.observers += [first, second]
    for i in range(3):
        add(engine, f"r{i}", prompt_of(20, i), 4 + i, temperature=0)
    drain(engine)
    engine.step()  # nothing to do: no step
    assert len(first.steps) == engine.stats().num_steps
    assert first.steps == second.steps
    for step in first.steps:
        assert step.seconds == 1
        assert step.batch.ranges[2] == len(step.plan.slices)
        assert len(step.sampled.token_ids) == sum(one.num_samples for one in step.plan.slices)
        assert len(step.result.advanced) == len(step.sampled.token_ids)
    assert first.num_changes == 0
    engine.update_params(1)
    assert first.num_changes == 1
    engine.observers.remove(first)
    add(engine, "late", [1, 2], 2)
    drain(engine)
    assert len(second.steps) == len(first.steps) + 2


@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_one_that_fails_costs_no_output(fails_at):
    engine = make_engine()
    engine.observers.append(Watching(fails_at))
    prompts = [prompt_of(9 + i, i) for i in range(3)]
    for i, prompt in enumerate(prompts):
        add(engine, f"r{i}", prompt, 6, temperature=0)
    parts: dict[str, list] = {}
    num_failures = 0
    while engine.has_work():
        try:
            outputs = engine.step()
        except OSError:
            num_failures += 1
            continue
        engine.check_invariants()
        for output in outputs:
            parts.setdefault(output.request_id, []).append(output)
    assert num_failures == 1
    for i, prompt in enumerate(prompts):
        assert merge_outputs(parts[f"r{i}"]).outputs[0].token_ids == expected_tokens(prompt, 6)
