"""Sends requests when they are due, and gives what became of them.

Used by `jaxserve bench serve`, `capacity.py` and `scripts/gates`. Invariant: when `run_load` is left, in
whichever way, no request of it is under way any more.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.server.load.records import LoadRequest, RequestRecord

CUT_OFF = "cut_off"  # the failure of requests that were under way when the load had to end


class Sender(Protocol):
    """`LoadClient.send`."""

    def __call__(
        self, request: LoadRequest, record: RequestRecord, *, begin_s: float = 0.0
    ) -> Awaitable[None]: ...


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """What was measured.

    Args:
        records: one a request that was due, in the order of the dataset.
        duration_s: from the first request to the last answer.
        lateness_s: how long after it was due each request was handed to the client: what a client that
            cannot keep up adds. Waiting for --max_concurrency is no part of it.
        cpu_s: time that this process computed meanwhile.
        num_not_sent: requests that were not due yet when the load had to end.
    """

    records: Sequence[RequestRecord]
    duration_s: float
    lateness_s: Sequence[float]
    cpu_s: float
    num_not_sent: int = 0


async def run_load(
    send: Sender,
    requests: Sequence[LoadRequest],
    arrivals_s: Sequence[float] | np.ndarray,
    *,
    max_concurrency: int | None = None,
    deadline_s: float | None = None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Sends every request at its time.

    Args:
        send: sends one and fills its record.
        requests: what is sent.
        arrivals_s: when each is due, ascending.
        max_concurrency: most requests under way at once; the others wait, in order.
        deadline_s: what is under way after so long is cut off, and what is not due yet is not sent.
        on_done: called with each record as it ends.
        clock: the one that `send` uses.

    Returns:
        The records of those that were sent.
    """
    records: list[RequestRecord] = []
    lateness: list[float] = []
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    begin, begin_cpu = clock(), time.process_time()

    async def send_one(request: LoadRequest, record: RequestRecord) -> None:
        try:
            async with places:
                await send(request, record, begin_s=begin)
        except asyncio.CancelledError:
            record.failure = record.failure or CUT_OFF
            raise
        finally:
            on_done(record)

    async def send_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for index, (request, due_s) in enumerate(zip(requests, arrivals_s, strict=True)):
                if (wait_s := due_s - (clock() - begin)) > 0:
                    await asyncio.sleep(wait_s)
                record = RequestRecord(index=index, due_s=float(due_s))
                records.append(record)
                tasks.create_task(send_one(request, record))
                lateness.append(clock() - begin - float(due_s))

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            await send_all()
    return LoadResult(
        records=records,
        duration_s=clock() - begin,
        lateness_s=lateness,
        cpu_s=time.process_time() - begin_cpu,
        num_not_sent=len(requests) - len(records),
    )
