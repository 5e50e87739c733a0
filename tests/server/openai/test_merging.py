import asyncio
import contextlib

import pytest

from jaxserve.errors import EngineDeadError
from jaxserve.request import RequestOutput
from jaxserve.server.openai.merging import merged


def _output(name):
    return RequestOutput(name, [], 1, 0, False)


class Generation:
    """Gives some outputs; remembers how far it came, and whether it was closed."""

    def __init__(self, name, num_outputs, error=None):
        self.name, self.num_outputs, self.error = name, num_outputs, error
        self.num_given = 0
        self.is_closed = False

    async def run(self):
        try:
            for _ in range(self.num_outputs):
                await asyncio.sleep(0)
                self.num_given += 1
                yield _output(self.name)
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


@pytest.mark.parametrize("counts", [[3], [3, 0, 5], [1] * 20])
def test_all_outputs_in_order(counts):
    async def check():
        generations = [Generation(str(i), count) for i, count in enumerate(counts)]
        found = [0] * len(counts)
        async for number, output in merged([one.run() for one in generations]):
            assert output.request_id == str(number)
            found[number] += 1
        assert found == counts
        assert all(one.is_closed for one in generations)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(check())


@pytest.mark.parametrize("num_others", [0, 2])
def test_the_error_of_one_closes_all(num_others):
    async def check():
        others = [Generation("x", 10**6) for _ in range(num_others)]
        failing = Generation("y", 2, EngineDeadError("gone"))
        generations = [*others, failing]
        with pytest.raises(EngineDeadError):
            async for _ in merged([one.run() for one in generations]):
                pass
        assert all(one.is_closed for one in generations)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(check())


@pytest.mark.parametrize("num_generations", [1, 3])
def test_closing_it_closes_all(num_generations):
    async def check():
        generations = [Generation("x", 10**6) for _ in range(num_generations)]
        async with contextlib.aclosing(merged([one.run() for one in generations])) as parts:
            async for _ in parts:
                break
        assert all(one.is_closed for one in generations if one.num_given)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(check())


def test_generations_take_turns():
    async def check():
        generations = [Generation(str(number), 200) for number in range(4)]
        first = []
        async with contextlib.aclosing(merged([one.run() for one in generations])) as parts:
            async for number, _ in parts:
                first.append(number)
                if len(first) == 40:
                    break
        assert all(8 <= first.count(number) <= 12 for number in range(4)), first

    asyncio.run(check())


def test_a_slow_reader_holds_all_of_them_up():
    async def check():
        generations = [Generation("x", 10**6) for _ in range(3)]
        async with contextlib.aclosing(merged([one.run() for one in generations])) as parts:
            async for _ in parts:
                for _ in range(100):
                    await asyncio.sleep(0)
                break
            assert all(one.num_given <= 2 for one in generations)

    asyncio.run(check())
