"""The loop itself, driven round by round: nothing is left behind, whenever a request is aborted."""

import random
import threading
import time
from collections import Counter

import pytest

from jaxserve.async_engine.commands import (
    AbortRequest,
    AddRequest,
    Answer,
    Command,
    Ended,
    Event,
    NotStarted,
    Query,
    Refused,
    Released,
    Started,
    Stop,
)
from jaxserve.async_engine.engine_loop import ClientGone, EngineLoop, Served, serve_line
from jaxserve.async_engine.step_clock import StepClock
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import BeamParams, SamplingParams
from tests.async_engine.clients import greedy_request
from tests.async_engine.fake_served import serve_fake

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRUCTURES = ({"json": SCHEMA}, {"json_object": True}, {"regex": "[a-z ]+"}, {"choice": ["a", "b"]})


class ScriptedLine:
    """A line whose commands a test writes; keeps the events."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.events: list[Event] = []
        self.timeouts: list[float | None] = []
        self.woken = threading.Event()
        self.is_gone = False

    def receive(self, timeout_s: float | None) -> list[Command]:
        self.timeouts.append(timeout_s)
        if self.is_gone:
            raise ClientGone
        if not self.commands and timeout_s != 0.0:
            self.woken.wait(5.0 if timeout_s is None else timeout_s)
        self.woken.clear()
        commands, self.commands = self.commands, []
        return commands

    def send(self, event: Event) -> None:
        self.events.append(event)

    def wake(self) -> None:
        self.woken.set()

    def outputs(self) -> list[RequestOutput]:
        released = [event for event in self.events if isinstance(event, Released)]
        return [output for event in released for output in event.outputs]


def make_loop(**options) -> tuple[EngineLoop, ScriptedLine, Served]:
    line = ScriptedLine()
    served = serve_fake(options)
    return EngineLoop(served, line, StepClock()), line, served


def check_nothing_left(loop: EngineLoop, served: Served) -> None:
    """No page, lock, sequence, group, grammar or entry of a table belongs to anybody."""
    engine = served.engine
    engine._drain()  # a step may be under way whose sequences have all ended
    assert not engine.has_work()
    engine.check_invariants()
    scheduler = engine.scheduler
    kv = scheduler.kv
    assert not loop._open
    assert not loop._told
    assert not len(loop._preparations)
    assert not engine.requests.in_flight
    assert not engine.requests.held
    assert not engine.requests.outbox
    assert not scheduler.running
    assert not list(scheduler.waiting)
    assert not list(scheduler.held)
    assert kv.num_owned_pages == 0
    assert kv.pool.num_free + kv.num_cached_pages == kv.pool.num_usable
    assert kv.host.num_free == kv.host.num_pages
    assert kv.tree is not None
    assert all(node.lock_ref == 0 for node in kv.tree.nodes())
    engine.reset_prefix_cache()
    assert kv.pool.num_free == kv.pool.num_usable
    assert kv.tree.num_pages == 0


def random_request(draw: random.Random, number: int, *, grammars: bool) -> Request:
    """Of every kind that takes something of the engine's: choices, beams, shared prefixes, chunks of
    long prompts, scored prompts."""
    shared = list(range(1, draw.choice([0, 9, 40]) + 1))
    own = [draw.randrange(10, 900) for _ in range(draw.choice([1, 3, 12, 60]))]
    prompt = shared + own
    num_tokens = draw.choice([0, 1, 5, 30])
    if draw.random() < 0.15:
        beam = BeamParams(beam_width=draw.choice([1, 2, 4]), max_tokens=max(1, num_tokens))
        return Request(id=f"{number}", prompt_token_ids=prompt, beam=beam)
    wanted = draw.choice(STRUCTURES) if grammars and draw.random() < 0.3 else None
    params = SamplingParams(
        structured_outputs=wanted,
        max_tokens=num_tokens,
        temperature=draw.choice([0.0, 1.0]),
        n=draw.choice([1, 1, 1, 2, 4]),
        prompt_logprobs=draw.choice([None, None, None, 1]),
        presence_penalty=draw.choice([0.0, 0.0, 1.0]),
    )
    salt = draw.choice([None, None, "a", "b"])
    return Request(
        id=f"{number}",
        prompt_token_ids=prompt,
        sampling_params=params,
        priority=draw.randrange(3),
        cache_salt=salt,
    )


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {}),
        (1, {"num_pages": 40, "num_host_pages": 30, "preemption_mode": "swap"}),
        (2, {"num_pages": 40, "admission": "priority", "eviction": "lfu"}),
        (3, {"max_num_seqs": 3, "num_decode_steps": 4}),
        (4, {"tokenizer": True}),
    ],
    ids=["roomy", "swapping", "tight", "several_steps", "texts"],
)
def test_random_aborts_leave_nothing_behind(seed, options):
    """10,000 requests over the five, most of them aborted: waiting, in the middle of a prompt, decoding,
    with choices and beams, after their end, and twice."""
    loop, line, served = make_loop(draws=True, **options)
    draw = random.Random(seed)
    open_ids: list[str] = []
    endings: Counter[str] = Counter()
    reasons: Counter[str | None] = Counter()
    num_added = 0
    num_requests = 400 if "tokenizer" in options else 2400
    while num_added < num_requests or open_ids:
        if num_added < num_requests and len(open_ids) < 24:
            for _ in range(draw.choice([0, 1, 4])):
                request = random_request(draw, num_added, grammars="tokenizer" in options)
                line.commands.append(AddRequest(request))
                open_ids.append(request.id)
                num_added += 1
        if open_ids and draw.random() < (0.6 if num_added < num_requests else 1.0):
            for request_id in draw.choices(open_ids, k=draw.choice([1, 1, 2, 5])):
                line.commands.append(AbortRequest(request_id))
        if draw.random() < 0.02:
            line.commands.append(Query(number=num_added, kind="reset_prefix_cache"))
        line.woken.set()
        loop._round()
        for output in line.outputs():
            if output.finished:
                endings[output.request_id] += 1
                open_ids.remove(output.request_id)
                reasons.update(one.finish_reason for one in output.outputs)
        assert not any(isinstance(event, Refused) for event in line.events), line.events
        line.events.clear()
        if num_added % 100 < 3:
            served.engine.check_invariants()
    assert set(endings.values()) == {1}, "a request ended twice, or never"
    assert len(endings) == num_added
    assert reasons["abort"] > num_requests / 2
    assert reasons["length"] > num_requests / 10
    check_nothing_left(loop, served)


def test_the_control_finds_what_is_left():
    loop, line, served = make_loop()
    line.commands.append(AddRequest(greedy_request("a", [1, 2, 3], 20)))
    loop._round()
    with pytest.raises(AssertionError):
        check_nothing_left(loop, served)
    line.commands.append(AbortRequest("a"))
    loop._round()
    check_nothing_left(loop, served)
    taken = served.engine.scheduler.kv.pool.alloc(1)
    with pytest.raises(AssertionError):
        check_nothing_left(loop, served)
    served.engine.scheduler.kv.pool.release(taken or ())


def test_an_abort_is_done_within_one_step():
    loop, line, served = make_loop()
    line.commands.append(AddRequest(greedy_request("a", list(range(1, 60)), 50)))
    loop._round()  # in the middle of its prompt
    num_steps = served.engine.stats().num_steps
    line.commands.append(AbortRequest("a"))
    loop._round()
    assert served.engine.stats().num_steps <= num_steps + 1
    (output,) = line.outputs()
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert output.num_prompt_tokens == 59


def test_it_waits_while_there_is_nothing_to_do():
    loop, line, _ = make_loop()
    line.commands = [AddRequest(greedy_request("a", [1], 3))]
    for _ in range(8):
        line.woken.set()
        loop._round()
    assert line.timeouts[0] is None
    assert line.timeouts[1:3] == [0.0] * 2
    assert line.timeouts[-1] is None, "it asks again and again"


def test_grammars_are_compiled_beside_the_steps():
    loop, line, served = make_loop(tokenizer=True)
    wants = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 20}
    line.commands = [
        AddRequest(greedy_request("plain", [1, 2], 100)),
        AddRequest(greedy_request("grammar", [3, 4], **wants)),
        AddRequest(greedy_request("left", [3, 4], **wants, n=3)),
        AddRequest(greedy_request("bad", [3, 4], structured_outputs={"regex": "("})),
    ]
    loop._round()
    assert len(line.outputs()) == 1, "the step did not wait"
    line.commands = [AbortRequest("left")]
    loop._round()
    ended = [one for one in line.outputs() if one.request_id == "left"]
    assert [one.finished for one in ended] == [True]
    assert [one.finish_reason for one in ended[0].outputs] == ["abort"] * 3
    assert ended[0].num_prompt_tokens == 2
    end_s = time.monotonic() + 60
    while loop._open:
        loop._round()
        assert time.monotonic() < end_s
    by_id = {one.request_id for one in line.outputs() if one.finished}
    assert by_id == {"plain", "grammar", "left"}
    (refused,) = [event for event in line.events if isinstance(event, Refused)]
    assert refused.request_id == "bad"
    assert refused.param == "structured_outputs.regex"
    assert refused.is_invalid
    # What was compiled once is taken at once.
    line.commands = [AddRequest(greedy_request("again", [3, 4], **wants))]
    loop._round()
    assert served.engine.has_request("again")
    line.commands = [AbortRequest("again")]
    loop._round()
    check_nothing_left(loop, served)


def test_a_failure_to_take_a_request_is_its_own_alone(caplog):
    loop, line, served = make_loop(tokenizer=True)

    def fails(request):
        raise OSError("no process")

    quick, served.preparer.prepare = served.preparer.prepare, fails  # type: ignore[method-assign]
    line.commands = [AddRequest(greedy_request("a", [1]))]
    line.woken.set()
    loop._round()
    (refused,) = line.events
    assert isinstance(refused, Refused)
    assert not refused.is_invalid
    assert "no process" in refused.message
    served.preparer.prepare = quick  # type: ignore[method-assign]
    line.commands = [AddRequest(greedy_request("a", [1], 1))]
    loop._round()
    assert line.outputs()[-1].request_id == "a"


def test_the_prompts_logprobs_are_sent_once():
    loop, line, served = make_loop()
    line.commands = [AddRequest(greedy_request("a", [1, 2, 3], 5, prompt_logprobs=0))]
    while not (line.outputs() and line.outputs()[-1].finished):
        loop._round()
    told = [output.prompt_logprobs is not None for output in line.outputs()]
    assert told == [True, False, False, False, False]
    check_nothing_left(loop, served)


def run_line(line: ScriptedLine, make) -> list[Event]:
    serve_line(make, line, StepClock())
    return line.events


def test_stop_ends_it_in_order():
    line = ScriptedLine()
    line.commands = [
        AddRequest(greedy_request("a", [1], 4)),
        Query(number=7, kind="stats"),
        Stop(100.0),
    ]
    events = run_line(line, serve_fake)
    assert isinstance(events[0], Started)
    assert [e.number for e in events if isinstance(e, Answer)] == [7]
    assert line.outputs()[-1].outputs[0].finish_reason == "length"
    assert events[-1] == Ended(None)


def test_stop_at_once_aborts():
    line = ScriptedLine()
    line.commands = [AddRequest(greedy_request("a", [1], 4)), Stop(0.0)]
    events = run_line(line, serve_fake)
    assert line.outputs()[-1].outputs[0].finish_reason == "abort"
    assert events[-1] == Ended(None)


def test_a_client_that_is_gone_ends_it():
    line = ScriptedLine()
    served = serve_fake()
    line.commands = [AddRequest(greedy_request("a", [1], 50))]
    loop = EngineLoop(served, line, StepClock())
    loop._round()
    line.is_gone = True
    with pytest.raises(ClientGone):
        loop.run()
    check_nothing_left(loop, served)
    assert not served.engine.observers


def test_what_cannot_be_made_is_told():
    line = ScriptedLine()
    events = run_line(line, lambda: serve_fake({"fails": "no room"}))
    assert events == [NotStarted("RuntimeError", "no room")]


def test_a_query_that_fails_is_answered():
    loop, line, served = make_loop()
    served.engine.stats = None  # type: ignore[assignment, method-assign]
    line.commands = [Query(number=1, kind="stats")]
    loop._round()
    (answer,) = line.events
    assert isinstance(answer, Answer)
    assert answer.error is not None
    assert answer.error.startswith("stats failed: TypeError")
