"""Where the time of a step goes: each compiled program's time, bytes and operations.

Used by `jaxserve bench latency --profile`. It knows none of the programs: `record_calls` stands in the
compiled table while an engine runs, waits for every call and looks at what it was given. Invariant: what
the programs compute is untouched; only their overlap with each other and with the host is gone.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxserve.device.programs import Key, ProgramTable
from pallas_kernels.ragged_paged_attention.layout import KVPages


@dataclass(kw_only=True)
class ProgramCalls:
    """What is known of one program.

    Args:
        key: its key in the table.
        seconds: of each call.
        num_weights: elements of the matrices that it is given in trees; an array that is an argument
            of its own is taken for activations.
        weight_bytes: of these matrices. A program with fewer operations than they have elements only
            looks rows up in them: then it is one row for each that it computes, and num_weights is 0.
        kv_token_bytes: of one token's keys and values, over the layers whose pages it is given.
        xla_flops, xla_bytes: XLA's own counts; None where it has none. A kernel that XLA only calls
            counts no operations, and all pages that it is given as bytes.
    """

    key: Key
    seconds: list[float] = field(default_factory=list)
    num_weights: int = 0
    weight_bytes: int = 0
    kv_token_bytes: int = 0
    xla_flops: float | None = None
    xla_bytes: float | None = None

    @property
    def num_rows(self) -> int:
        """Its rung: the tokens or rows that it computes."""
        return max(part for part in self.key if isinstance(part, int))

    def moved_bytes(self, num_context_tokens: int) -> int:
        """Bytes that a call has to read.

        Args:
            num_context_tokens: sum of the rows' contexts.
        """
        return self.weight_bytes + self.kv_token_bytes * num_context_tokens

    @property
    def flops(self) -> float:
        """Operations of a call: those of the products with its matrices, or XLA's count if that is
        more.
        """
        return max(2.0 * self.num_rows * self.num_weights, self.xla_flops or 0.0)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@contextlib.contextmanager
def record_calls(table: ProgramTable) -> Iterator[dict[Key, ProgramCalls]]:
    """Records every call of a program while the `with` lasts.

    Args:
        table: the programs of an engine that runs meanwhile.

    Yields:
        What was recorded so far, in the order of first calls.
    """
    found: dict[Key, ProgramCalls] = {}

    def wrap(key: Key, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls = found.get(key)
            if calls is None:
                calls = found[key] = _look_at(key, compiled, arguments)
            jax.block_until_ready(arguments)
            begin = time.perf_counter()
            results = jax.block_until_ready(compiled(*arguments))
            calls.seconds.append(time.perf_counter() - begin)
            return results

        return call

    with table.called_through(wrap):
        yield found


def _look_at(key: Key, compiled: Any, arguments: tuple[Any, ...]) -> ProgramCalls:
    """Counts what a program is given; reads shapes only, for donated arguments are gone afterwards."""
    trees = [one for one in arguments if not isinstance(one, jax.Array)]
    leaves = jax.tree.leaves_with_path(trees, is_leaf=lambda one: isinstance(one, KVPages))
    pools = [one for _, one in leaves if isinstance(one, KVPages)]
    matrices = [one for path, one in leaves if _is_read_whole(path, one)]
    flops, accessed = _xla_counts(compiled)
    num_weights = sum(one.size for one in matrices)
    is_lookup = flops is not None and flops < num_weights and not _calls_a_kernel(compiled)
    calls = ProgramCalls(
        key=key,
        num_weights=0 if is_lookup else num_weights,
        kv_token_bytes=sum(_token_bytes(pool) for pool in pools),
        xla_flops=flops,
        xla_bytes=accessed,
    )
    sizes = [
        one.nbytes // one.shape[0] * calls.num_rows if is_lookup else one.nbytes for one in matrices
    ]
    calls.weight_bytes = sum(sizes)
    return calls


def _is_read_whole(path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether it is a matrix, or a layer whose matrices are one array (`model.packed`)."""
    is_layer = bool(path) and getattr(path[-1], "key", None) == "packed"
    return isinstance(leaf, jax.Array) and (leaf.ndim > 1 or is_layer)


def _token_bytes(pool: KVPages) -> int:
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(pool))
    return stored // (pool.num_pages * pool.page_size)


def _calls_a_kernel(compiled: Any) -> bool:
    """Whether something that XLA did not compile, and so cannot count, is part of a program."""
    return "custom-call(" in compiled.as_text()


def _xla_counts(compiled: Any) -> tuple[float | None, float | None]:
    """(operations, bytes accessed) by XLA's cost analysis, None where it gives none."""
    analyse = getattr(compiled, "cost_analysis", None)
    counts = None
    if analyse is not None:
        with contextlib.suppress(NotImplementedError, jax.errors.JaxRuntimeError):
            counts = analyse()
    counts = counts or {}
    return counts.get("flops"), counts.get("bytes accessed")
