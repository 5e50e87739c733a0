"""The compiled table: (program, rung) -> executable, built ahead of time from shapes alone.

The hot path calls only this table. A compiled executable takes exactly the shapes and dtypes it was
made for, so a wrong one raises at once; nothing here can compile while a request waits.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax

Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to compile.

    Args:
        key: (name, rung).
        function: pure; compiled as it stands.
        arguments: abstract arrays, or arrays whose shapes and dtypes are taken.
        donated: argument numbers whose buffers the program may reuse.
        out_shardings: where what is returned goes, a tree or the beginning of one; None = as the compiler
            likes, on the default device.
        returns: the NamedTuples that the function returns and is not given: a program that is kept
            on disk is put together again from them.
    """

    key: Key
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    out_shardings: Any = None
    returns: tuple[type, ...] = ()


class Lowering(Protocol):
    """How a program becomes something to compile: `lower_traced`, or a `ProgramStore`."""

    def __call__(self, program: Program) -> jax.stages.Lowered: ...


def lower_traced(program: Program) -> jax.stages.Lowered:
    """Traces and lowers a program."""
    return jitted(program, program.function).lower(*program.arguments)


def jitted(program: Program, function: Callable[..., Any]) -> Any:
    """`jax.jit` of a function that stands for a program's."""
    if program.out_shardings is None:
        return jax.jit(function, donate_argnums=program.donated)
    return jax.jit(function, donate_argnums=program.donated, out_shardings=program.out_shardings)


class ProgramTable:
    """Programs by (name, rung).

    Args:
        lower: how programs are lowered.
    """

    def __init__(self, lower: Lowering = lower_traced) -> None:
        self._lower = lower
        self._compiled: dict[Key, jax.stages.Compiled] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def __getitem__(self, key: Key) -> jax.stages.Compiled:
        """The executable; a KeyError here is a bucket that warm-up did not know of."""
        return self._compiled[key]

    def compile_all(self, programs: Sequence[Program]) -> None:
        """Lowers each program in turn and compiles them in parallel. Put the slowest first.

        Lowering stays in one thread: it is Python all through, so threads would only wait for
        each other.
        """
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            futures: dict[Key, Future[jax.stages.Compiled]] = {}
            for program in programs:
                futures[program.key] = pool.submit(self._lower(program).compile)
            self._compiled = {key: future.result() for key, future in futures.items()}

    @contextlib.contextmanager
    def called_through(self, wrap: Callable[[Key, Any], Callable[..., Any]]) -> Iterator[None]:
        """While this lasts, what is looked up is wrap(key, executable): for profiles."""
        own = self._compiled
        self._compiled = {key: wrap(key, one) for key, one in own.items()}  # type: ignore[misc]
        try:
            yield
        finally:
            self._compiled = own
