"""Several generations as one: `merged`. Used by `endpoint` for bodies with many prompts.

Invariants: memory is bounded by one output a generation: a slow reader holds them all up, and the engine's
client merges what waits. Generations take turns: one that always has something keeps no other one waiting.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from jaxserve.request import RequestOutput


async def merged(
    generations: Sequence[AsyncGenerator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(number of the generation, its next output), as they come.

    Closing it closes all of them, and so does the error of one, which is raised here.
    """
    if len(generations) == 1:  # as of almost every request: without a task of its own
        async with contextlib.aclosing(generations[0]) as only:
            async for output in only:
                yield 0, output
        return
    ready: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()
    taken = [asyncio.Semaphore(0) for _ in generations]
    tasks = [
        asyncio.create_task(_pump(number, one, ready, taken[number]))
        for number, one in enumerate(generations)
    ]
    num_open = len(tasks)
    try:
        while num_open:
            number, found = await ready.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                num_open -= 1
            else:
                yield number, found
                taken[number].release()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    number: int,
    outputs: AsyncGenerator[RequestOutput],
    ready: asyncio.Queue[tuple[int, RequestOutput | Exception | None]],
    taken: asyncio.Semaphore,
) -> None:
    """Puts the outputs of one generation there, each once the one before it was taken."""
    end: Exception | None = None
    try:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                ready.put_nowait((number, output))
                await taken.acquire()
    except Exception as error:  # noqa: BLE001 - raised again by whoever reads
        end = error
    ready.put_nowait((number, end))
