"""A schedule log of a real forward, replayed on the real device: the same tokens."""

import json

import pytest

from jaxserve.request import Request
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.schedule.preemption import PreemptionMode
from jaxserve.schedule.replay import ScheduleLog, replay
from jaxserve.schedule.schedule_log import LogHeader, ScheduleLogWriter
from tests.e2e.test_memory import PRESSED, pressed_requests
from tests.llms import shared_llm


@pytest.fixture(scope="module")
def log() -> list[bytes]:
    """Chunks, prefix hits, copies, swaps, seeded draws, choices and beams, with pages for a third."""
    llm = shared_llm(**PRESSED)
    engine, lines = llm.engine, []
    engine.scheduler.kv.clear_cache()
    engine.scheduler.preemption = PreemptionMode("swap", engine.executor.costs)
    header = LogHeader.of(engine.stats(), version="0", host_kv_gib=PRESSED["host_kv_gib"])
    writer = ScheduleLogWriter(lambda line: lines.append(line.encode()), header)
    engine.observers.append(writer)
    prompts, params = pressed_requests()
    beam = BeamParams(beam_width=2, max_tokens=6)
    engine.add(Request(id="beams", prompt_token_ids=prompts[0][:11], beam=beam))
    choices = SamplingParams(max_tokens=5, temperature=1, seed=5, n=3)
    engine.add(Request(id="choices", prompt_token_ids=prompts[1], sampling_params=choices))
    llm.generate(prompts, params)
    while llm.has_work():
        llm.step()
    engine.observers.remove(writer)
    return lines


def replay_on_the_device(lines: list[bytes]):
    engine = shared_llm(**PRESSED).engine
    engine.executor.reset()  # nothing may be left of the run itself
    engine.scheduler.kv.clear_cache()  # its pages hold what is replayed
    return replay(engine.executor, ScheduleLog(lines))


def test_the_same_tokens(log):
    done = replay_on_the_device(log)
    steps = [one for one in map(json.loads, log) if "step" in one]
    assert done.difference is None
    assert done.num_steps == len(steps)
    assert done.num_tokens > 8 * 24
    for key in ("copies", "moves_out", "moves_in", "tokens"):
        assert any(key in step for step in steps), f"the run has {key}"


def test_another_seed_is_found(log):
    lines = list(log)
    at = next(i for i, line in enumerate(lines) if b'"temperature":1' in line)
    changed = json.loads(lines[at])
    changed["seed"] += 1
    lines[at] = json.dumps(changed).encode() + b"\n"
    difference = replay_on_the_device(lines).difference
    assert difference is not None
    assert difference.request_id == changed["request_id"]
