"""When waiting requests may join the running ones at all. One small class per way, kept in `GATES`.

Which of them comes first is another question: `queue.py`.
"""

from typing import Protocol


class Gate(Protocol):
    """Asked by the scheduler before each admission; told of each one made. `num_running` leaves out
    those that only wait for the result of the step under way."""

    def may_admit(self, num_running: int) -> bool: ...

    def admitted(self) -> None: ...


class ContinuousGate:
    """A request joins as soon as a slot, budget and pages are free.

    Source: Orca (Yu et al., OSDI 2022), section 4.1, iteration-level scheduling.
    """

    def may_admit(self, num_running: int) -> bool:
        del num_running
        return True

    def admitted(self) -> None:
        pass


class StaticGate:
    """A batch takes members until the first of them is done, then drains before the next is formed.

    The arm that continuous batching is compared with.
    """

    def __init__(self) -> None:
        self._num_members = 0

    def may_admit(self, num_running: int) -> bool:
        if num_running == 0:
            self._num_members = 0
        return num_running == self._num_members

    def admitted(self) -> None:
        self._num_members += 1


GATES: dict[str, type[Gate]] = {
    "continuous": ContinuousGate,
    "static": StaticGate,
}
