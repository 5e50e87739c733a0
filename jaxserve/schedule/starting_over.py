"""What makes a scheduler give up all that was computed: other weights, memory that is given back, a step
that was cut short. Called by the engine, between two steps.

Invariant: afterwards nobody has a page, and each sequence has the tokens that it had.
"""

from collections.abc import Iterable
from itertools import chain

from jaxserve.schedule.queue import WaitingQueue
from jaxserve.schedule.scheduler import Scheduler
from jaxserve.schedule.sequence import Sequence, Status


def give_up_all(scheduler: Scheduler) -> None:
    """Gives up all pages, the cached ones too: every sequence computes its tokens again."""
    for seq in reversed(list(scheduler.running)):
        scheduler.running.remove(seq)
        scheduler.parked.give_up_pages(seq)
        seq.status = Status.PREEMPTED
        scheduler.waiting.push(seq)
    for seq in chain(scheduler.waiting, scheduler.held):
        scheduler.parked.give_up_pages(seq)
    scheduler.kv.clear_cache()


def change_weights(scheduler: Scheduler, version: int) -> None:
    """Makes sure that nothing computed by the weights so far is used again.

    Args:
        scheduler: no step is under way.
        version: of the new weights.
    """
    give_up_all(scheduler)
    scheduler.weights_version = version
    for seq in chain(scheduler.waiting, scheduler.held):
        seq.begin_version(version)
    for seq in [seq for seq in scheduler.held if seq.wants_candidates]:
        scheduler.resume(seq)  # a beam: its candidates were those of the old weights


def restart(scheduler: Scheduler, seqs: Iterable[Sequence]) -> None:
    """Starts over from these sequences: empty pages, all of them waiting but those held.

    For after a step that was cut short, when queues and pages may be in any state.
    """
    scheduler.kv.reset()
    scheduler.running, scheduler.held = [], []
    scheduler.parked.clear()
    scheduler.waiting = WaitingQueue(scheduler.policy)
    for seq in seqs:
        seq.forget_step()
        seq.begin_version(scheduler.weights_version)
        seq.page_table = scheduler.kv.new_table()
        seq.num_computed_tokens = 0
        seq.host_pages = None
        if seq.status is Status.HELD:
            scheduler.held.append(seq)
            continue
        if seq.status is not Status.WAITING:
            seq.status = Status.PREEMPTED
        scheduler.waiting.push(seq)
