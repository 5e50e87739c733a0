"""`Encoder`: a small thread pool that renders chat templates and tokenizes, away from the event loop.

`ServerState` holds two: one for requests that generate, which `Admission` bounds, and one for those that
only want tokens or text, so that the latter never hold the former up. Threads suffice, because the
tokenizer gives the interpreter's lock away while it works.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from jaxserve.server.errors import RETRY_AFTER_S, ApiError


class Encoder:
    """Runs functions in threads.

    Args:
        num_threads: how many at once; what is beyond waits its turn.
        max_waiting: how many may wait; None = any number.
        name: of the threads.
    """

    def __init__(
        self, num_threads: int, *, max_waiting: int | None = None, name: str = "encoder"
    ) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._most = None if max_waiting is None else num_threads + max_waiting
        self._max_waiting = max_waiting
        self._num_in = 0

    async def run[*Ts, T](self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Awaits function(*arguments); what it raises is raised here.

        Raises:
            ApiError: 429, too many wait already.
        """
        if self._most is not None and self._num_in >= self._most:
            raise ApiError(
                429,
                f"the queue is full: {self._max_waiting} requests wait for a thread",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        loop = asyncio.get_running_loop()
        # Counted until it has run, also where nobody waits for it any more.
        future = self._threads.submit(function, *arguments)
        self._num_in += 1

        def is_done(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody counts
                loop.call_soon_threadsafe(self._count_out)

        future.add_done_callback(is_done)
        return await asyncio.wrap_future(future)

    def _count_out(self) -> None:
        self._num_in -= 1

    def shutdown(self) -> None:
        """Takes no more work, and waits for none."""
        self._threads.shutdown(wait=False, cancel_futures=True)
