"""What holds of an engine's requests between two steps. Called by `Engine.check_invariants`, in tests.

Invariant: every request in flight is queued or held by the scheduler, and nobody else's pages are owned.
"""

from collections.abc import Mapping

from jaxserve.groups.group import Group
from jaxserve.groups.outbox import Outbox
from jaxserve.schedule.scheduler import Scheduler


def check_requests(
    groups: Mapping[str, Group],
    held_groups: Mapping[str, Group],
    outbox: Outbox,
    scheduler: Scheduler,
) -> None:
    """Raises AssertionError when the queues, the pages and the requests disagree.

    Args:
        groups: in flight, by request id.
        held_groups: ended, their pages kept.
        outbox: of the engine.
        scheduler: of the engine.
    """
    scheduler.check_invariants()
    outbox.check_invariants()
    for group in (*groups.values(), *held_groups.values()):
        group.check_invariants()
    queued = {s.request.id for s in (*scheduler.running, *scheduler.waiting)}
    held = {s.request.id for s in scheduler.held}
    assert queued <= groups.keys(), "an ended request still runs"
    assert groups.keys() <= queued | held, "a request is lost"
    assert held_groups.keys() <= held - queued, "a held request is lost"
    assert held <= groups.keys() | held_groups.keys(), "nobody holds a sequence"
    if not queued and not held:
        assert scheduler.kv.num_owned_pages == 0, "pages leaked"
