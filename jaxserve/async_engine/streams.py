"""`Stream`: what came of one request and was not read yet, on the client's side. Owned by `Client`.

Invariant: a reader is woken at most once for each part that is put, and not at all while it is busy: what
comes meanwhile waits, and is merged when it is read. So a slow reader holds nobody up, and what waits for
it is at most what its request can produce.
"""

import asyncio

from jaxserve.request import PromptLogprob, RequestOutput, merge_outputs


class Stream:
    """Parts in, by `put`, and out, by `next`; both in one event loop."""

    def __init__(self) -> None:
        self.is_abandoned = False  # nobody reads it any more
        self._parts: list[RequestOutput] = []
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None  # the reader waits for it
        self._gone: asyncio.Future[None] | None = None  # others wait for its end
        self._prompt_logprobs: list[PromptLogprob | None] | None = None

    def put(self, part: RequestOutput) -> None:
        """Takes a part."""
        if part.prompt_logprobs is not None:
            self._prompt_logprobs = part.prompt_logprobs
        elif self._prompt_logprobs is not None:
            part.prompt_logprobs = self._prompt_logprobs  # they are told once
        self._parts.append(part)
        _wake(self._news)
        if part.finished:
            _wake(self._gone)

    def fail(self, error: Exception) -> None:
        """No part comes any more; those that wait are read first."""
        self._error = error
        _wake(self._news)
        _wake(self._gone)

    async def next(self) -> RequestOutput:
        """All that has come since the last call, as one part; waits while there is nothing.

        Raises:
            Exception: what `fail` was given.
        """
        while not self._parts:
            if self._error is not None:
                raise self._error
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            finally:
                self._news = None
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else merge_outputs(parts)

    async def wait_gone(self) -> None:
        """Returns when the last part was put, or the stream failed."""
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._gone)


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
