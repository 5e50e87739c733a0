"""What must hold between any two calls of the scheduler. Called by tests after every operation."""

from typing import TYPE_CHECKING

from jaxserve.schedule.sequence import Status

if TYPE_CHECKING:
    from jaxserve.schedule.scheduler import Scheduler


def check_scheduler(scheduler: "Scheduler") -> None:
    """Raises AssertionError when a queue, a sequence or a page is not as it should be."""
    running, held, parked = scheduler.running, scheduler.held, scheduler.parked
    waiting = list(scheduler.waiting)
    scheduler.waiting.check_invariants()
    standings = [scheduler.policy.standing(seq) for seq in running]
    assert standings == sorted(standings), "running sequences out of order"
    assert len(running) <= scheduler.buckets.max_num_seqs
    for seq in running:
        assert seq.status is Status.RUNNING
        assert seq.host_pages is None
        assert seq.num_tokens_to_compute >= 1, "a running sequence with nothing to compute"
    for seq in waiting:
        assert seq.status in (Status.WAITING, Status.PREEMPTED)
        assert not (len(seq.page_table) and seq.host_pages), "pages on the device and on the host"
    for seq in held:
        assert seq.status is Status.HELD
    everyone = [*running, *waiting, *held]
    assert len(set(everyone)) == len(everyone), "a sequence is in two queues"
    for seq in everyone:
        assert seq.num_computed_tokens <= seq.page_table.num_slots, "computed without a page"
    assert set(parked) <= {*waiting, *held}, "parked, but neither waiting nor held"
    owners = {seq for seq in (*waiting, *held) if len(seq.page_table)}
    assert owners <= set(parked), "a sequence has pages and is not parked"
    host_pages = [seq.host_pages for seq in everyone if seq.host_pages is not None]
    scheduler.kv.check_invariants([seq.page_table for seq in everyone], host_pages)
