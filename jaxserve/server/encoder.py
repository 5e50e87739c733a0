"""`Encoder`: the small thread pool that renders chat templates and tokenizes, away from the event loop.

Held by `ServerState`. Both are bounded by the sizes of request bodies; threads suffice, because the
tokenizer gives the interpreter's lock away while it works.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Encoder:
    """Runs functions in threads.

    Args:
        num_threads: how many at once; what is beyond waits its turn.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="encoder")

    async def run[*Ts, T](self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Awaits function(*arguments); what it raises is raised here."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)

    def shutdown(self) -> None:
        """Takes no more work, and waits for none."""
        self._threads.shutdown(wait=False, cancel_futures=True)
