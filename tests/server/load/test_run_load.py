"""Requests go out when they are due, no more at once than allowed, and none is left behind."""

import asyncio
import time

import pytest

from jaxserve.server.load.records import LoadRequest, RequestRecord
from jaxserve.server.load.run_load import CUT_OFF, LoadResult, run_load


class Sender:
    """Answers after a while, and counts how many are under way."""

    def __init__(self, takes_s: float):
        self.takes_s = takes_s
        self.under_way = 0
        self.most = 0

    async def __call__(
        self, request: LoadRequest, record: RequestRecord, *, begin_s: float = 0.0
    ) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        record.sent_s = time.perf_counter() - begin_s
        try:
            await asyncio.sleep(self.takes_s)
            record.release_s.append(time.perf_counter() - begin_s)
            record.ended_s = record.release_s[-1]
        finally:
            self.under_way -= 1


def load(sender: Sender, arrivals: list[float], **options) -> LoadResult:
    requests = [LoadRequest(body={"i": i}) for i in range(len(arrivals))]
    return asyncio.run(run_load(sender, requests, arrivals, **options))


def test_each_is_sent_when_it_is_due():
    done: list[int] = []
    arrivals = [0.0, 0.05, 0.05, 0.1]
    result = load(Sender(0.01), arrivals, on_done=lambda record: done.append(record.index))
    assert [one.due_s for one in result.records] == arrivals
    assert all(one.sent_s >= one.due_s for one in result.records)
    assert all(one.is_good for one in result.records)
    assert sorted(done) == [0, 1, 2, 3]
    assert len(result.lateness_s) == 4
    assert min(result.lateness_s) >= 0
    assert result.duration_s >= 0.11
    assert result.num_not_sent == 0


def test_concurrency_is_bounded_and_used():
    for most in (1, 3):
        sender = Sender(0.01)
        result = load(sender, [0.0] * 9, max_concurrency=most)
        assert sender.most == most
        assert result.duration_s >= 0.09 / most
        assert all(one.is_good for one in result.records)
        sent = [one.sent_s for one in result.records]
        assert sent == sorted(sent)  # those that wait keep their order


def test_a_deadline_cuts_off_what_is_under_way_and_sends_no_more():
    sender = Sender(30)
    result = load(sender, [0.0, 0.0, 25.0], deadline_s=0.1)
    assert [one.failure for one in result.records] == [CUT_OFF, CUT_OFF]
    assert result.num_not_sent == 1
    assert sender.under_way == 0
    assert result.duration_s < 20


def test_an_error_of_the_client_itself_ends_the_load():
    class Broken(Sender):
        async def __call__(self, request, record, *, begin_s=0.0):
            if request.body["i"] == 1:
                raise RuntimeError("a bug")
            await super().__call__(request, record, begin_s=begin_s)

    sender = Broken(30)
    with pytest.raises(ExceptionGroup) as caught:
        load(sender, [0.0, 0.0, 0.0])
    assert caught.group_contains(RuntimeError, match="a bug")
    assert sender.under_way == 0
