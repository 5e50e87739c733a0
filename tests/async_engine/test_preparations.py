"""Who is prepared when: senders take turns, and none of them has all threads."""

import threading
import time
from collections.abc import Callable

from jaxserve.async_engine.preparations import MOST_OF_ONE, NUM_THREADS, Preparations
from jaxserve.prepare import Prepared
from jaxserve.request import Request


class HeldPreparer:
    """Prepares a request when a test says so.

    Attributes:
        begun: ids of the requests, in the order in which threads took them.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._ends: dict[str, threading.Event] = {}

    def prepare(self, request: Request) -> Prepared:
        end = self._ends.setdefault(request.id, threading.Event())
        self.begun.append(request.id)
        assert end.wait(60)
        if request.id.endswith("bad"):
            raise ValueError("no")
        return Prepared(request, None, None)

    def end(self, request_id: str) -> None:
        self._ends.setdefault(request_id, threading.Event()).set()


def make() -> tuple[Preparations, HeldPreparer, threading.Event]:
    preparer, woken = HeldPreparer(), threading.Event()
    return Preparations(preparer, woken.set), preparer, woken  # type: ignore[arg-type]


def request(name: str, sender: str = "") -> Request:
    return Request(id=name, prompt_token_ids=[1], sender=sender)


def wait_for(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_one_sender_leaves_a_thread_to_others():
    preparations, preparer, _ = make()
    for number in range(10):
        preparations.begin(request(f"a{number}", "a"))
    wait_for(lambda: len(preparer.begun) == MOST_OF_ONE)
    preparations.begin(request("b0", "b"))
    wait_for(lambda: "b0" in preparer.begun)
    assert len(preparer.begun) == NUM_THREADS
    preparer.end("b0")
    wait_for(lambda: [name for name, _ in preparations.take()] == ["b0"])
    assert len(preparer.begun) == NUM_THREADS, "the last thread waits for another sender"
    preparer.end("a0")
    wait_for(lambda: len(preparer.begun) == NUM_THREADS + 1)
    preparations.close()


def test_senders_take_turns():
    preparations, preparer, _ = make()
    for number in range(6):
        preparations.begin(request(f"a{number}", "a"))
    wait_for(lambda: len(preparer.begun) == MOST_OF_ONE)
    preparations.begin(request("b0", "b"))
    wait_for(lambda: "b0" in preparer.begun)
    for name, sender in (("b1", "b"), ("c0", "c"), ("b2", "b")):
        preparations.begin(request(name, sender))
    for name, following in (("a0", "a3"), ("a1", "b1"), ("a2", "c0"), ("a3", "a4"), ("b0", "b2")):
        preparer.end(name)
        wait_for(lambda following=following: following in preparer.begun)
        assert preparer.begun[-1] == following
    preparations.close()


def test_senders_that_are_not_told_apart_have_all_threads():
    preparations, preparer, woken = make()
    for number in range(NUM_THREADS + 1):
        preparations.begin(request(f"{number}"))
    wait_for(lambda: len(preparer.begun) == NUM_THREADS)
    preparations.cancel("4")
    assert "4" not in preparations
    preparations.cancel("0")
    preparations.begin(request("bad"))
    for name in ("0", "1", "2", "3", "bad"):
        preparer.end(name)
    results = {}
    wait_for(lambda: results.update(preparations.take()) is None and len(results) == 4)
    assert woken.is_set()
    assert results.keys() == {"1", "2", "3", "bad"}
    assert isinstance(results["bad"], ValueError)
    assert "4" not in preparer.begun
    assert not len(preparations)
    preparations.close()
