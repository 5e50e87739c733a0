"""Frames, and the engine's end of a line whose client is slow, silent or gone."""

import select
import socket
import threading
import time

import pytest

from jaxserve.async_engine.commands import AbortRequest, Answer, Ended, Released
from jaxserve.async_engine.engine_loop import ClientGone
from jaxserve.async_engine.messages import Settings, decode
from jaxserve.async_engine.pipes import FrameError, Frames, SocketLine, frame
from jaxserve.request import CompletionOutput, PromptLogprob, RequestOutput


@pytest.fixture
def ends():
    """(the client's socket, the engine's line)"""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with ours, theirs:
        yield ours, SocketLine(theirs)


def part(name: str, number: int, *, finished: bool = False) -> RequestOutput:
    one = CompletionOutput(0, f"{number} ", [number], finish_reason="length" if finished else None)
    return RequestOutput(name, [one], 1, 0, finished)


def read_all(ours: socket.socket, line: SocketLine) -> list:
    """All that the line has to send, read as it comes."""
    frames, found = Frames(), []
    while True:
        line._flush()
        if not select.select([ours], [], [], 0.05)[0]:
            return found
        found += map(decode, frames.feed(ours.recv(10_000)))


@pytest.mark.parametrize("size", [1, 3, 7, 10**6])
def test_frames_are_found_however_they_are_cut(size):
    messages = [AbortRequest("a" * n) for n in (0, 1, 300)]
    data = b"".join(map(frame, messages))
    frames = Frames()
    found = [
        decode(one) for i in range(0, len(data), size) for one in frames.feed(data[i : i + size])
    ]
    assert found == messages


def test_a_frame_beyond_the_limit_is_none():
    with pytest.raises(FrameError, match="bytes or fewer"):
        Frames().feed(b"\xff\xff\xff\xff")


def test_commands_come_in_order(ends):
    ours, line = ends
    assert line.receive(0.0) == []
    sent = [AbortRequest(str(i)) for i in range(100)]
    ours.sendall(b"".join(map(frame, sent)))
    assert line.receive(None) == sent


def test_settings_come_first(ends):
    ours, line = ends
    settings = Settings("m", "auto", {}, 20)
    ours.sendall(frame(settings))
    assert line.receive_settings() == settings
    ours.sendall(frame(AbortRequest("a")))
    with pytest.raises(FrameError):
        line.receive_settings()


def test_wake_ends_a_wait_and_a_timeout_does(ends):
    _, line = ends
    timer = threading.Timer(0.1, line.wake)
    timer.start()
    assert line.receive(None) == []
    timer.join()
    for _ in range(10**5):
        line.wake()  # never waits, however often
    begin_s = time.monotonic()
    while line.receive(0.05) == [] and time.monotonic() < begin_s + 0.2:
        pass
    assert line.receive(0.01) == []


def test_a_client_that_is_gone(ends):
    ours, line = ends
    line.send(Released([part("a", 1)]))
    ours.close()
    line.send(Released([part("a", 2)]))
    with pytest.raises(ClientGone):
        line.receive(None)
    line.send(Released([part("a", 3)]))
    with pytest.raises(ClientGone):
        line.receive(0.0)


def test_a_client_that_reads_nothing_holds_nothing_up(ends):
    """What it has not read is merged by request; other events come behind it, in order."""
    ours, line = ends
    num_steps, names = 2000, [f"r{i}" for i in range(20)]
    for number in range(num_steps):
        line.send(Released([part(name, number) for name in names]))
        if number == 1900:
            line.send(Answer(number=1))
    line.send(Released([part("r0", num_steps, finished=True)]))
    line.send(Ended(None))
    assert len(line._unsent) < 10**6
    assert len(line._late) == len(names)
    read = read_all(ours, line)
    assert [type(one) for one in read[-3:]] == [Released, Answer, Ended]
    by_name: dict[str, list[int]] = {}
    num_parts = 0
    for event in read[:-2]:
        for output in event.outputs:
            num_parts += 1
            by_name.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    assert by_name.pop("r0") == list(range(num_steps + 1))
    assert all(ids == list(range(num_steps)) for ids in by_name.values())
    assert num_parts < num_steps * len(names) / 2
    (last,) = [one for one in read[-3].outputs if one.request_id == "r0"]
    assert last.finished
    assert last.outputs[0].text.endswith(f" {num_steps} ")


def test_merged_parts_keep_the_prompts_logprobs(ends):
    ours, line = ends
    filler = CompletionOutput(0, "x" * 10**6, [1])
    line.send(Released([RequestOutput("other", [filler], 1, 0, False)]))
    assert line._unsent
    first = part("a", 1)
    first.prompt_logprobs = [None, PromptLogprob(-1.0, [], 1)]
    line.send(Released([first]))
    line.send(Released([part("a", 2)]))
    (late,) = read_all(ours, line)[-1].outputs
    assert late.prompt_logprobs == first.prompt_logprobs
    assert late.outputs[0].token_ids == [1, 2]


def test_finish_sends_what_is_left(ends):
    ours, line = ends
    event = Released([RequestOutput("a", [CompletionOutput(0, "x" * 10**6, [1])], 1, 0, True)])
    line.send(event)
    line.send(Ended(None))
    thread = threading.Thread(target=line.finish, args=(10.0,))
    thread.start()
    frames, found = Frames(), []
    while data := ours.recv(10**5):
        found += map(decode, frames.feed(data))
    thread.join()
    assert found == [event, Ended(None)]
