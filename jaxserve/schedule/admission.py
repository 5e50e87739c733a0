"""When a waiting request may join the running ones. One small class per policy, kept in `ADMISSIONS`."""

from typing import Protocol


class Admission(Protocol):
    """Asked by the scheduler before each admission; told of each one made."""

    def may_admit(self, num_running: int) -> bool: ...

    def admitted(self) -> None: ...


class ContinuousAdmission:
    """A request joins as soon as a slot, budget and pages are free.

    Source: Orca (Yu et al., OSDI 2022), section 4.1, iteration-level scheduling.
    """

    def may_admit(self, num_running: int) -> bool:
        del num_running
        return True

    def admitted(self) -> None:
        pass


class StaticAdmission:
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


ADMISSIONS: dict[str, type[Admission]] = {
    "continuous": ContinuousAdmission,
    "static": StaticAdmission,
}
