"""A server without a server: a deterministic queue with a known capacity.

Used by test_capacity.py. Requests come in step; `num_servers` of them are served at once, each for
`service_s`, in order. A request's first token comes when its service begins, plus `prefill_s`.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.server.load.capacity import Objective, Probe, judge
from jaxserve.server.load.records import RequestRecord
from jaxserve.server.load.run_load import LoadResult


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The model; it can serve num_servers / service_s requests a second for ever."""

    service_s: float = 0.5
    num_servers: int = 4
    prefill_s: float = 0.1

    def serve(self, rate: float, count: int) -> LoadResult:
        """What a load of `count` requests at `rate` sees."""
        free = [0.0] * self.num_servers
        records = []
        for index in range(count):
            due = index / rate
            begin = max(due, heapq.heappop(free))
            heapq.heappush(free, begin + self.service_s)
            record = RequestRecord(index=index, due_s=due, sent_s=due, num_output_tokens=2)
            record.release_s = [begin + self.prefill_s, begin + self.service_s]
            record.ended_s = begin + self.service_s
            records.append(record)
        duration = max(one.ended_s or 0 for one in records)
        return LoadResult(records=records, duration_s=duration, lateness_s=[0.0] * count, cpu_s=0.0)

    def probe(self, rate: float, objectives: Sequence[Objective], probe_s: float = 60.0) -> Probe:
        """A probe of it."""
        result = self.serve(rate, max(20, round(rate * probe_s)))
        return Probe(request_rate=rate, broken=judge(result, objectives))
