"""What an engine compiles: `StepShapes` holds all that the shapes of its programs depend on.

Made by `jaxserve.build`; read by the executor, by its page moves, and by whoever asks how much memory
a step takes. Invariant: shapes only, nothing here is on a device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxserve.config import KV_CACHE_DTYPES
from jaxserve.device.placement import DEFAULT_DEVICE, WHOLE, Placement
from jaxserve.device.programs import Key, Lowering, Program, ProgramTable, lower_traced
from jaxserve.device.row_programs import (
    RawLogits,
    Sampled,
    bias_rows,
    candidates,
    head,
    penalty_rows,
    sample_rows,
    sampling_rows,
)
from jaxserve.device.scoring import SCORE_ROWS, ScoredBlock, gather_rows, score_rows
from jaxserve.device.step import Embedded, StillInputs, embed_tokens, moving_inputs, select
from jaxserve.model.kv_scales import KVScales
from jaxserve.model.registry import ModelFunctions, Params
from jaxserve.model.sharding import pages_spec, param_specs
from jaxserve.model_config import LayerKind
from jaxserve.sample.logprobs import TargetScores
from jaxserve.sample.processors import BiasRows, PenaltyRows, add_sampled, load_counts, process
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.schedule.batch import MAX_CANDIDATES, DeviceBatch, LogitBias, Penalties
from jaxserve.schedule.buckets import Bucket, Buckets
from pallas_kernels.ragged_paged_attention.layout import KVPages, is_8bit

COUNT_PIECE = 1024  # tokens of a history that one call puts into the count table


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShapes:
    """All that the shapes of the programs depend on.

    Args:
        model: the model's functions.
        buckets: the shapes to compile.
        num_pages: pages in the pool, the null page included.
        page_size: tokens a page.
        max_pages: pages a sequence (P).
        layout: page layout of the attention backend.
        dtype: of activations.
        kv_dtype: element type of the pages; the 8-bit ones go with scales.
        layers_per_program: consecutive layers compiled as one program; divides the number of
            layers.
        num_token_ids: how many ids of the vocabulary are tokens; None = all. The rest is padding of
            the head, never sampled and never counted.
        placement: the devices.
    """

    model: ModelFunctions
    buckets: Buckets
    num_pages: int
    page_size: int
    max_pages: int
    layout: str
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    layers_per_program: int
    num_token_ids: int | None = None
    placement: Placement = DEFAULT_DEVICE

    @property
    def kv_cache_dtype(self) -> str:
        """The element type of the pages as the settings call it."""
        names = {element: name for name, element in KV_CACHE_DTYPES.items()}
        return names[jnp.dtype(self.kv_dtype).name]

    @property
    def runs(self) -> list[slice]:
        """The layers of each call of a program that takes `layers_per_program` of them."""
        size, num_layers = self.layers_per_program, self.model.config.num_layers
        return [slice(begin, begin + size) for begin in range(0, num_layers, size)]

    @property
    def run_programs(self) -> list[str]:
        """The name of the program that each of `runs` calls."""
        kinds = self.model.config.layer_kinds
        return [self._layer_programs[kinds[run]] for run in self.runs]

    @property
    def _layer_programs(self) -> dict[tuple[LayerKind, ...], str]:
        """What layers of those kinds, one after the other, are called as; in the order of their first run."""
        kinds = self.model.config.layer_kinds
        sorts = dict.fromkeys(kinds[run] for run in self.runs)
        return {sort: f"layers_{i}" if i > 1 else "layers" for i, sort in enumerate(sorts, 1)}

    @property
    def page_shape(self) -> tuple[int, ...]:
        """(L, K, 2, page, D): a page of every layer in the canonical format."""
        config = self.model.config
        return config.num_layers, config.num_kv_heads, 2, self.page_size, config.head_dim

    @property
    def num_ids(self) -> int:
        """How many ids are tokens: those from here on are padding."""
        vocab_size = self.model.config.vocab_size
        return vocab_size if self.num_token_ids is None else min(self.num_token_ids, vocab_size)

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that a row gets when a batch wants them (K)."""
        return min(MAX_CANDIDATES, self.num_ids)

    @property
    def abstract_last_ids(self) -> jax.ShapeDtypeStruct:
        """What the logit rows of a step sampled, i32[S], as a shape only."""
        return jax.ShapeDtypeStruct((self.buckets.max_num_seqs,), jnp.int32)

    @property
    def abstract_counts(self) -> jax.ShapeDtypeStruct:
        """How often the sequences with penalties have said each token, i32[S, V], as a shape only."""
        shape = (self.buckets.max_num_seqs, self.model.config.vocab_size)
        table = jax.ShapeDtypeStruct(shape, jnp.int32)
        return self.placement.abstract(table, self.placement.logits)

    @functools.cached_property
    def served_params(self) -> Params:
        """What programs take, as shapes and where they are."""
        params = self.model.served_params
        if self.model.packs:
            return self.placement.abstract(params)
        return self.placement.abstract(params, param_specs(params, self.placement.rules))

    @property
    def pages_spec(self) -> P:
        """How the arrays of a pool are cut."""
        return pages_spec(self.layout, self.placement.rules.heads)

    def program(
        self,
        key: Key,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        donated: tuple[int, ...] = (),
        returns: tuple[type, ...] = (),
        results: Any = WHOLE,
    ) -> Program:
        """A program on the devices: arguments that do not say where they are, and results, are whole on
        each of them.

        Args:
            key, function, arguments, donated, returns: as of `Program`.
            results: how what is returned is cut, a tree of specs or the beginning of one.
        """
        return Program(
            key=key,
            function=function,
            arguments=self.placement.abstract(arguments),
            donated=donated,
            out_shardings=self.placement.shardings(results),
            returns=returns,
        )

    def no_options(self, num_rows: int) -> tuple[PenaltyRows, BiasRows, np.ndarray]:
        """(penalties, logit_bias, masks u32[R, W]) of rows that ask for none of them."""
        num_words = -(-self.model.config.vocab_size // 32)
        return (
            penalty_rows(Penalties.off(num_rows, self.buckets.max_num_seqs)),
            bias_rows(LogitBias.off(num_rows)),
            np.full((num_rows, num_words), 0xFFFFFFFF, np.uint32),
        )

    def abstract_pages(self) -> list[KVPages]:
        """The pages of every layer as shapes only."""
        config = self.model.config
        one = KVPages.abstract(
            self.layout,
            self.num_pages,
            self.page_size,
            config.num_kv_heads,
            config.head_dim,
            self.kv_dtype,
        )
        return [self.placement.abstract(one, self.pages_spec)] * config.num_layers

    def abstract_scales(self) -> list[KVScales] | None:
        """The scales of every layer as shapes only; None where pages are floats."""
        if not is_8bit(self.kv_dtype):
            return None
        one = jax.ShapeDtypeStruct((self.model.config.num_kv_heads,), jnp.float32)
        one = self.placement.abstract(one, self.placement.heads)
        return [KVScales(one, one)] * self.model.config.num_layers

    def abstract_hidden(self, num_rows: int) -> jax.ShapeDtypeStruct:
        """Hidden rows [num_rows, E] as a shape only."""
        return jax.ShapeDtypeStruct((num_rows, self.model.config.hidden_size), self.dtype)

    def padding(self, bucket: Bucket) -> DeviceBatch:
        """A batch without live tokens, with one row that counts as sampled."""
        return DeviceBatch.padding(bucket, self.buckets, self.max_pages, num_rows=1)

    def programs(self) -> list[Program]:
        """Every program of the ladders, the slowest to compile first."""
        tokens, rows = reversed(self.buckets.tokens), reversed(self.buckets.rows)
        return [
            *(program for t in tokens for program in self.token_programs(t)),
            *(program for r in rows for program in self.row_programs(r)),
            *self.score_programs(),
            self.count_program(),
        ]

    def token_programs(self, num_tokens: int) -> list[Program]:
        """The programs of one rung of T.

        Those of layers, one for each sort of run, give back their input and their pages: both are
        donated.
        """
        padding = self.padding(Bucket(num_tokens, 1))
        still = StillInputs.of(padding)
        params = self.served_params
        x = self.abstract_hidden(num_tokens)
        run = slice(self.layers_per_program)
        scales = self.abstract_scales()
        return [
            *(
                self.program(
                    (name, num_tokens),
                    functools.partial(self.model.layers, kinds=kinds),
                    (
                        self.model.layer_params(params)[run],
                        self.abstract_pages()[run],
                        x,
                        padding.positions,
                        still.rows(padding.kv_lens),
                        None if scales is None else scales[run],
                    ),
                    donated=(1, 2),
                    results=(WHOLE, self.pages_spec),
                )
                for kinds, name in self._layer_programs.items()
            ),
            self.program(
                ("embed", num_tokens),
                functools.partial(embed_tokens, self.model, num_tokens),
                (params["embed"], moving_inputs(padding), self.abstract_last_ids),
                returns=(Embedded,),
            ),
            self.program(("select", num_tokens), select, (x, still.logit_rows, still.cu_q_lens)),
            self.program(("gather_scored", num_tokens), gather_rows, (x, self.abstract_block)),
        ]

    def row_programs(self, num_rows: int) -> list[Program]:
        """The programs of one rung of R. Logits stay cut by vocabulary; what the host reads is whole."""
        max_num_seqs, cut = self.buckets.max_num_seqs, self.placement.logits
        hidden = self.abstract_hidden(max_num_seqs)
        logits = jax.ShapeDtypeStruct((num_rows, self.model.config.vocab_size), jnp.float32)
        logits = self.placement.abstract(logits, cut)
        rows = sampling_rows(self.padding(Bucket(1, num_rows)))
        ids = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
        finite = [jax.ShapeDtypeStruct((n,), jnp.bool_) for n in (num_rows, max_num_seqs)]
        return [
            self.program(
                ("head", num_rows),
                functools.partial(head, self.model, num_rows, self.num_ids),
                (self.model.head_params(self.served_params), hidden),
                returns=(RawLogits,),
                results=RawLogits(logits=cut, finite=WHOLE),  # type: ignore[arg-type]
            ),
            self.program(
                ("process", num_rows),
                process,
                (logits, self.abstract_counts, *self.no_options(num_rows)),
                results=cut,
            ),
            self.program(
                ("sample", num_rows),
                sample_rows,
                (logits, logits, *finite, rows),
                returns=(Sampled,),
            ),
            self.program(
                ("count", num_rows),
                add_sampled,
                (self.abstract_counts, ids, ids),
                donated=(0,),
                results=cut,
            ),
            self.program(
                ("candidates", num_rows),
                functools.partial(candidates, self.num_candidates),
                (logits, logits, rows),
            ),
        ]

    @property
    def abstract_block(self) -> jax.ShapeDtypeStruct:
        """One number for each row that is scored together, i32[SCORE_ROWS], as a shape only."""
        return jax.ShapeDtypeStruct((SCORE_ROWS,), jnp.int32)

    def score_programs(self) -> list[Program]:
        """The programs that score a block of rows."""
        head_params = self.model.head_params(self.served_params)
        num_top = min(MAX_LOGPROBS, self.num_ids)
        return [
            self.program(
                (name, SCORE_ROWS),
                functools.partial(score_rows, self.model, self.num_ids, most),
                (head_params, self.abstract_hidden(SCORE_ROWS), self.abstract_block),
                returns=(ScoredBlock, TargetScores),
            )
            for name, most in (("score_top", num_top), ("score", 0))
        ]

    def count_program(self) -> Program:
        """Puts histories into the count table, COUNT_PIECE tokens at a time."""
        ids = jax.ShapeDtypeStruct((COUNT_PIECE,), jnp.int32)
        slot, starts_over = np.zeros((), np.int32), np.zeros((), np.bool_)
        return self.program(
            ("load_counts", COUNT_PIECE),
            load_counts,
            (self.abstract_counts, slot, starts_over, ids, ids),
            donated=(0,),
            results=self.placement.logits,
        )


def count_table_bytes(shapes: StepShapes) -> int:
    """Memory, in bytes of each device, of the table that penalties read."""
    table = shapes.abstract_counts
    own = table.shape if table.sharding is None else table.sharding.shard_shape(table.shape)
    return math.prod(own) * table.dtype.itemsize


def largest_step_bytes(shapes: StepShapes, lower: Lowering = lower_traced) -> int:
    """Memory, in bytes of each device, that the largest step takes beyond params and pages.

    Compiles the largest programs against whatever small pool `shapes` names: the pool's size hardly
    matters to it.

    Args:
        shapes: of the engine.
        lower: how programs are lowered.
    """
    table = ProgramTable(lower)
    largest = [
        *shapes.token_programs(shapes.buckets.tokens[-1]),
        *shapes.row_programs(shapes.buckets.rows[-1]),
        *shapes.score_programs(),
    ]
    table.compile_all(largest)
    own_vocab = shapes.model.config.vocab_size // shapes.placement.shares.vocab
    logits_bytes = 4 * shapes.buckets.rows[-1] * own_vocab
    sizes = []
    for program in largest:
        analysis = table[program.key].memory_analysis()
        assert analysis is not None, f"no memory analysis of {program.key} on this platform"
        # Raw and processed logits wait on the device while the programs run that read them.
        held = {"process": 1, "sample": 2, "count": 2, "candidates": 2}.get(program.key[0], 0)
        sizes.append(
            analysis.temp_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + held * logits_bytes
        )
    return int(max(sizes))
