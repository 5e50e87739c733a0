"""`FirstReady`: waits for the first of several steps, each on a device of its own.

Used by `ReplicatedEngine`. jax can wait for one array or for all, but not for the first of several, so each
replica has a thread that does nothing but wait for its step.

Invariant: the threads touch nothing but handles; none of them keeps its `FirstReady` alive.
"""

import threading
import weakref
from collections.abc import Mapping
from queue import SimpleQueue

from jaxserve.executor import StepHandle


class FirstReady:
    """Waits for steps of `num_replicas` replicas."""

    def __init__(self, num_replicas: int):
        self._done: SimpleQueue[int] = SimpleQueue()
        self._to_wait_for: list[SimpleQueue[StepHandle | None]] = []
        self._waiting: dict[int, StepHandle] = {}  # what each thread is at
        for replica in range(num_replicas):
            handles: SimpleQueue[StepHandle | None] = SimpleQueue()
            self._to_wait_for.append(handles)
            threading.Thread(
                target=_wait_for_each,
                args=(replica, handles, self._done),
                name=f"replica-{replica}",
                daemon=True,
            ).start()
            weakref.finalize(self, handles.put, None)

    def __call__(self, handles: Mapping[int, StepHandle]) -> list[int]:
        """Returns when at least one of the steps is ready.

        Args:
            handles: by replica; at least one.

        Returns:
            Every replica whose step is ready, in their order.
        """
        while not (ready := [i for i, handle in handles.items() if handle.is_ready()]):
            for replica, handle in handles.items():
                if self._waiting.get(replica) is not handle:
                    self._waiting[replica] = handle
                    self._to_wait_for[replica].put(handle)
            # Perhaps the end of a step that was found ready without waiting: then all are asked again.
            self._waiting.pop(self._done.get(), None)
        return ready


def _wait_for_each(
    replica: int, handles: "SimpleQueue[StepHandle | None]", done: "SimpleQueue[int]"
) -> None:
    while (handle := handles.get()) is not None:
        handle.wait()
        del handle  # while it waits for the next one, this one's arrays may go
        done.put(replica)
