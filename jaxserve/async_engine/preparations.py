"""`Preparations`: requests whose grammars are being compiled, beside the steps. Owned by `EngineLoop`.

A grammar that nobody used before is compiled in a thread; the limits (time, memory, size) are those of
`constraints.grammar_check`, whose process does the costly part. So no request, however nasty its
schema, holds a step up. What needs no compiling never comes here.

Invariant: the engine is not touched from these threads: they make, the loop takes.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from jaxserve.prepare import Prepared, Preparer
from jaxserve.request import Request

NUM_THREADS = 4  # grammars compiled at once; those that come after wait


class Preparations:
    """Prepares requests in threads of its own, which end with the process.

    Args:
        preparer: of the engine.
        wake: called from those threads when there is something to take.
    """

    def __init__(self, preparer: Preparer, wake: Callable[[], None]):
        self._preparer = preparer
        self._wake = wake
        self._wanted: SimpleQueue[Request | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Request, Prepared | Exception]] = SimpleQueue()
        self._pending: dict[str, Request] = {}
        self._num_threads = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def begin(self, request: Request) -> None:
        """Prepares a request; `take` gives it back."""
        self._pending[request.id] = request
        self._wanted.put(request)
        if self._num_threads < min(len(self._pending), NUM_THREADS):
            # Daemons: to end the process does not mean to wait for a grammar.
            threading.Thread(
                target=self._work, name=f"grammars-{self._num_threads}", daemon=True
            ).start()
            self._num_threads += 1

    def cancel(self, request_id: str) -> None:
        """Wants a request no more."""
        del self._pending[request_id]

    def take(self) -> list[tuple[str, Prepared | Exception]]:
        """What is done, and still wanted."""
        found = []
        while not self._done.empty():
            request, result = self._done.get()
            if self._pending.get(request.id) is request:
                del self._pending[request.id]
                found.append((request.id, result))
        return found

    def close(self) -> None:
        """Ends the threads, each after what it is at."""
        self._pending.clear()
        for _ in range(self._num_threads):
            self._wanted.put(None)

    def _work(self) -> None:
        while (request := self._wanted.get()) is not None:
            result: Prepared | Exception
            if self._pending.get(request.id) is not request:
                continue  # cancelled meanwhile
            try:
                result = self._preparer.prepare(request)
            except Exception as error:  # noqa: BLE001 - told to whoever asked
                result = error
            self._done.put((request, result))
            self._wake()
