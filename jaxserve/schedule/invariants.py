"""What must hold between any two calls of the scheduler. Called by tests after every operation."""

from collections.abc import Iterable
from collections.abc import Sequence as Several

from jaxserve.pages.kv_manager import KVManager
from jaxserve.schedule.queue import WaitingQueue
from jaxserve.schedule.sequence import Sequence, Status


def check_queues(
    *,
    running: Several[Sequence],
    waiting: WaitingQueue,
    held: Several[Sequence],
    parked: Iterable[Sequence],
    kv: KVManager,
) -> None:
    """Raises AssertionError when a queue, a sequence or a page is not as it should be."""
    waiting.check_invariants()
    standings = [waiting.policy.standing(seq) for seq in running]
    assert standings == sorted(standings), "running sequences out of order"
    for seq in running:
        assert seq.status is Status.RUNNING
        assert seq.host_pages is None
        is_asked = seq.wants_candidates and seq.num_in_flight > 0
        assert seq.num_tokens_to_compute >= 1 or is_asked, (
            "a running sequence with nothing to compute"
        )
        assert seq.next_position <= seq.page_table.num_slots, "in flight without a page"
    for seq in waiting:
        assert seq.status in (Status.WAITING, Status.PREEMPTED)
        assert seq.num_tokens_to_compute >= 1, "a waiting sequence with nothing to compute"
        assert not (len(seq.page_table) and seq.host_pages), "pages on the device and on the host"
    for seq in held:
        assert seq.status is Status.HELD, f"held, but {seq.status.value}"
        assert seq.host_pages is None
    everyone = [*running, *waiting, *held]
    assert len(set(everyone)) == len(everyone), "a sequence is in two queues"
    for seq in everyone:
        pending = seq.token_ids[seq.num_known_tokens :]
        assert all(token_id < 0 for token_id in pending), "a pending token is known"
        assert seq.status is Status.RUNNING or not seq.num_in_flight, "in flight, and not running"
        assert seq.num_computed_tokens <= seq.page_table.num_slots, "computed without a page"
    owners = {seq for seq in (*waiting, *held) if len(seq.page_table)}
    assert owners == set(parked), "parked without pages, or pages and not parked"
    host_pages = [seq.host_pages for seq in everyone if seq.host_pages is not None]
    kv.check_invariants([seq.page_table for seq in everyone], host_pages)
