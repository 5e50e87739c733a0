"""`Preparations`: requests whose grammars are being compiled, beside the steps. Owned by `EngineLoop`.

A grammar that nobody used before is compiled in a thread; the limits (time, memory, size) are those of
`constraints.grammar_check`, whose process does the costly part. So no request, however nasty its
schema, holds a step up. What needs no compiling never comes here.

Senders take turns, and one of several threads is always left for another sender: whoever sends schemas
that take seconds each keeps nobody waiting but himself.

Invariant: the engine is not touched from these threads: they make, the loop takes.
"""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from queue import SimpleQueue

from jaxserve.prepare import Prepared, Preparer
from jaxserve.request import Request

NUM_THREADS = 4  # grammars compiled at once; those that come after wait
MOST_OF_ONE = (
    NUM_THREADS - 1
)  # of them for one sender; all of them where senders are not told apart


class Preparations:
    """Prepares requests in threads of its own, which end with the process.

    Args:
        preparer: of the engine.
        wake: called from those threads when there is something to take.
    """

    def __init__(self, preparer: Preparer, wake: Callable[[], None]):
        self._preparer = preparer
        self._wake = wake
        self._done: SimpleQueue[tuple[Request, Prepared | Exception]] = SimpleQueue()
        self._pending: dict[str, Request] = {}
        self._num_threads = 0
        self._changed = threading.Condition()  # guards what follows
        self._waiting: OrderedDict[str, deque[Request]] = OrderedDict()  # by sender, in their turns
        self._num_taken: Counter[str] = Counter()  # threads, by sender
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def begin(self, request: Request) -> None:
        """Prepares a request; `take` gives it back."""
        self._pending[request.id] = request
        with self._changed:
            self._waiting.setdefault(request.sender, deque()).append(request)
            self._changed.notify()
        if self._num_threads < min(len(self._pending), NUM_THREADS):
            # Daemons: to end the process does not mean to wait for a grammar.
            threading.Thread(
                target=self._work, name=f"grammars-{self._num_threads}", daemon=True
            ).start()
            self._num_threads += 1

    def cancel(self, request_id: str) -> None:
        """Wants a request no more."""
        request = self._pending.pop(request_id)
        with self._changed:
            own = self._waiting.get(request.sender)
            if own is None:
                return
            others = deque(one for one in own if one is not request)
            if others:
                self._waiting[request.sender] = others
            else:
                del self._waiting[request.sender]

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
        with self._changed:
            self._waiting.clear()
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (request := self._next()) is not None:
            result: Prepared | Exception
            try:
                result = self._preparer.prepare(request)
            except Exception as error:  # noqa: BLE001 - told to whoever asked
                result = error
            with self._changed:
                self._num_taken[request.sender] -= 1
                if not self._num_taken[request.sender]:
                    del self._num_taken[request.sender]
                self._changed.notify()
            self._done.put((request, result))
            self._wake()

    def _next(self) -> Request | None:
        """The next request of the sender whose turn it is; waits for one. None = there will be none."""
        with self._changed:
            while not self._is_closed:
                for sender, own in self._waiting.items():
                    if self._num_taken[sender] >= (MOST_OF_ONE if sender else NUM_THREADS):
                        continue
                    request = own.popleft()
                    del self._waiting[sender]
                    if own:
                        self._waiting[sender] = own  # behind all others
                    self._num_taken[sender] += 1
                    return request
                self._changed.wait()
            return None
