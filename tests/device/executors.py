"""Small executors and hand-made batches for the tests of the device layer.

Executors are shared: a test leaves one with whatever pages it likes, and asks for a fresh one where it
changes more than that.
"""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import KV_CACHE_DTYPES
from jaxserve.device.executor import DeviceExecutor
from jaxserve.device.kv_pool import count_table_program, pool_program
from jaxserve.device.params import put_params
from jaxserve.device.step_shapes import StepShapes
from jaxserve.model.attention import AttentionKernel
from jaxserve.model.kv_scales import KVScales
from jaxserve.model.registry import build_model
from jaxserve.schedule.batch import DeviceBatch
from jaxserve.schedule.buckets import Bucket, Buckets
from jaxserve.weights.loader import load_params, open_checkpoint
from pallas_kernels.ragged_paged_attention.layout import is_8bit
from tests.checkpoints import make_random_llama

TINY = Path(__file__).parents[2] / "checkpoints" / "tiny_llama"
NUM_PAGES, PAGE_SIZE, MAX_PAGES, NUM_HOST_PAGES = 48, 4, 8, 40
BUCKETS = Buckets(max_num_seqs=4, max_num_batched_tokens=16, tokens=(16,), rows=(4,))
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@functools.cache
def untied_checkpoint() -> Path:
    """A random Llama whose head is not its embedding: a bad embedding spoils its own token alone."""
    folder = tempfile.mkdtemp(prefix="jaxserve-untied-")
    return make_random_llama(Path(folder), {"head_dim": 64, "num_hidden_layers": 2})


def update_params(executor: DeviceExecutor, params: object) -> None:
    """Other weights from the next step on."""
    executor.use_params(executor.prepare_params(params))


def make_executor(
    model: Path = TINY,
    *,
    kv_cache_dtype: str = "auto",
    layout: str = "split",
    num_host_pages: int = NUM_HOST_PAGES,
    check_batches: bool = False,
    steps: bool = True,
) -> DeviceExecutor:
    """A warm executor with two runs of one layer each; without `steps` one that can move pages only,
    with one run of two layers.
    """
    dtype = jnp.dtype(jnp.float32)
    params, config = load_params(open_checkpoint(model), dtype)
    functions = build_model(config, dtype, AttentionKernel(backend="xla"))
    shapes = StepShapes(
        model=functions,
        buckets=BUCKETS,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_pages=MAX_PAGES,
        layout=layout,
        dtype=dtype,
        kv_dtype=jnp.dtype(KV_CACHE_DTYPES[kv_cache_dtype] or dtype),
        layers_per_program=1 if steps else 2,
    )
    scales = None
    if is_8bit(shapes.kv_dtype):
        one = jnp.full(config.num_kv_heads, 0.05, jnp.float32)
        scales = [KVScales(one, one)] * config.num_layers
    executor = DeviceExecutor(
        shapes,
        put_params(params, functions.abstract_params, pack=functions.layout),
        kv_scales=scales,
        num_host_pages=num_host_pages,
        check_batches=check_batches,
    )
    if steps:
        executor.warm_up()
    else:
        pools = [pool_program(shapes), count_table_program(shapes)]
        executor._programs.compile_all([*executor._moves.list_programs(), *pools])
        executor.reset()
    return executor


@functools.cache
def shared_pages(kv_cache_dtype: str, layout: str = "split") -> DeviceExecutor:
    """Pages of that form without the programs of a step, which take long to compile."""
    return make_executor(kv_cache_dtype=kv_cache_dtype, layout=layout, steps=False)


@functools.cache
def shared_executor(model: Path = TINY, kv_cache_dtype: str = "auto") -> DeviceExecutor:
    """One executor per model and type of pages; batches are checked."""
    return make_executor(model, kv_cache_dtype=kv_cache_dtype, check_batches=True)


class Slice(NamedTuple):
    """Tokens of one sequence to compute: `ids` stand at `start` and after it."""

    ids: Sequence[int]
    pages: Sequence[int]
    start: int = 0
    samples: bool = True


def make_batch(*slices: Slice, wants_candidates: bool = False, **moves: object) -> DeviceBatch:
    """A greedy batch. Slices must come ordered by their number of tokens.

    Args:
        slices: none at all is padding.
        moves: moves_out, copies, moves_in as lists of pairs.
    """
    bucket, num_seqs = Bucket(BUCKETS.tokens[0], BUCKETS.rows[0]), BUCKETS.max_num_seqs
    token_ids, positions = np.zeros((2, bucket.num_tokens), np.int32)
    table = np.zeros((num_seqs, MAX_PAGES), np.int32)
    kv_lens, logit_rows = np.zeros((2, num_seqs), np.int32)
    ends = np.cumsum([len(one.ids) for one in slices], dtype=np.int32)
    cu_q_lens = np.full(num_seqs + 1, ends[-1] if slices else 0, np.int32)
    cu_q_lens[0], cu_q_lens[1 : len(slices) + 1] = 0, ends
    num_rows = 0
    for row, one in enumerate(slices):
        begin, end = cu_q_lens[row : row + 2]
        token_ids[begin:end] = one.ids
        kv_lens[row] = one.start + len(one.ids)
        positions[begin:end] = range(one.start, kv_lens[row])
        table[row, : len(one.pages)] = one.pages
        if one.samples:
            logit_rows[num_rows] = end - 1
            num_rows += 1
    num_single = sum(len(one.ids) == 1 for one in slices)
    rows = bucket.num_rows
    return DeviceBatch(
        bucket=bucket,
        num_rows=num_rows,
        token_ids=token_ids,
        positions=positions,
        page_table=table.reshape(-1),
        kv_lens=kv_lens,
        kv_starts=np.zeros(num_seqs, np.int32),
        cu_q_lens=cu_q_lens,
        ranges=np.array([num_single, num_single, len(slices)], np.int32),
        logit_rows=logit_rows,
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        seeds=np.zeros((rows, 2), np.uint32),
        output_positions=np.zeros(rows, np.int32),
        wants_logprobs=np.ones(rows, np.bool_),
        reports_processed=np.zeros(rows, np.bool_),
        wants_candidates=wants_candidates,
        **{name: pairs(*of) for name, of in moves.items()},  # type: ignore[misc]
    )


def pairs(*of: tuple[int, int]) -> np.ndarray:
    """i32[2, n]."""
    return np.array(of, np.int32).reshape(-1, 2).T.copy()


def fill_pages(executor: DeviceExecutor, seed: int = 0) -> None:
    """Random bits in every page, many of them NaN of every payload."""
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.Array) -> jax.Array:
        return jnp.array(np.frombuffer(rng.bytes(leaf.nbytes), leaf.dtype).reshape(leaf.shape))

    executor._kv_pages = jax.tree.map(draw, executor._kv_pages)


def page_bits(executor: DeviceExecutor) -> np.ndarray:
    """[L, N, 2, ...]: what every page holds, as unsigned integers; a copy."""
    layers = [np.stack([np.asarray(a) for a in kv.data], axis=1) for kv in executor._kv_pages]
    return np.stack([one.view(BITS[one.dtype.itemsize]) for one in layers])
