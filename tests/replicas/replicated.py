"""Replicated engines over fake devices that are slow in ways of their own."""

import itertools
from collections.abc import Sequence

from jaxserve.replicas.engine import ReplicatedEngine
from jaxserve.schedule.batch import DeviceBatch
from tests.fakes import FakeExecutor, FakeHandle, make_engine


class SlowHandle:
    """A step that is ready after it was asked so often, or when somebody has waited for it."""

    def __init__(self, handle: FakeHandle, num_asks: int):
        self._handle = handle
        self._num_asks = num_asks

    def give_masks(self, masks) -> None:
        self._handle.give_masks(masks)

    def is_ready(self) -> bool:
        self._num_asks -= 1
        return self._num_asks < 0

    def wait(self) -> None:
        self._num_asks = 0

    def result(self):
        return self._handle.result()


class SlowExecutor(FakeExecutor):
    """Its steps take by turns 0, 1 and 3 asks."""

    def __init__(self, **options):
        super().__init__(**options)
        self._delays = itertools.cycle((0, 3, 1))
        self.num_submitted = 0

    def submit(self, batch: DeviceBatch) -> SlowHandle:  # type: ignore[override]
        self.num_submitted += 1
        return SlowHandle(super().submit(batch), next(self._delays))


def make_replicated(
    num_replicas: int = 2, executor_class: type[FakeExecutor] = SlowExecutor, **options: object
) -> ReplicatedEngine:
    """Engines of `tests.fakes.make_engine` behind one face."""
    options = {"async_scheduling": True} | options
    return ReplicatedEngine(
        [make_engine(executor_class=executor_class, **options) for _ in range(num_replicas)]  # type: ignore[arg-type]
    )


def replica_of(engine: ReplicatedEngine, request_id: str) -> int:
    """The one that has a request in flight."""
    (found,) = [i for i, one in enumerate(engine.engines) if one.has_request(request_id)]
    return found


def ids_of(parts: dict[str, list], request_id: str, index: int = 0) -> list[int]:
    """What `tests.fakes.drain` says that a choice has released."""
    outputs: Sequence = [o for part in parts[request_id] for o in part.outputs if o.index == index]
    return [i for output in outputs for i in output.token_ids]
