"""`DeviceExecutor`: the owner of params, KV pages and compiled programs; meets
`jaxserve.executor.Executor`.

Made by `jaxserve.build`. The pages are donated to every step and replaced by what it returns, so
the pool exists once and is updated in place. Nothing else may hold them.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import KV_CACHE_DTYPES
from jaxserve.device.programs import Program, ProgramTable
from jaxserve.device.step import forward_inputs, sample_rows, sampling_rows, select_rows
from jaxserve.model.kv_scales import KVScales
from jaxserve.model.registry import ModelFunctions, Params
from jaxserve.schedule.batch import DeviceBatch, SampledTokens
from jaxserve.schedule.buckets import Bucket, Buckets
from pallas_kernels.ragged_paged_attention.layout import KVPages, is_8bit
from pallas_kernels.ragged_paged_attention.row_checks import check_rows


class DeviceStep:
    """A step under way; `result` waits for it."""

    def __init__(
        self, num_rows: int, outputs: tuple[jax.Array, jax.Array] | None, pages: jax.Array
    ):
        self._num_rows = num_rows
        self._outputs = outputs
        self._pages = pages

    def result(self) -> SampledTokens:
        """Blocks until the step is done, also when it samples nothing, so that its errors surface
        here.
        """
        if self._outputs is None:
            self._pages.block_until_ready()
            empty = np.zeros((0, 1))
            return SampledTokens(
                token_ids=empty.astype(np.int32),
                num_tokens=np.zeros(0, np.int32),
                logprobs=empty.astype(np.float32),
            )
        token_ids, logprobs = (np.asarray(x)[: self._num_rows, None] for x in self._outputs)
        return SampledTokens(
            token_ids=token_ids, num_tokens=np.ones(self._num_rows, np.int32), logprobs=logprobs
        )


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

    @property
    def kv_cache_dtype(self) -> str:
        """The element type of the pages as the settings call it."""
        names = {element: name for name, element in KV_CACHE_DTYPES.items()}
        return names[jnp.dtype(self.kv_dtype).name]

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
        return [one] * config.num_layers

    def abstract_scales(self) -> list[KVScales] | None:
        """The scales of every layer as shapes only; None where pages are floats."""
        if not is_8bit(self.kv_dtype):
            return None
        one = jax.ShapeDtypeStruct((self.model.config.num_kv_heads,), jnp.float32)
        return [KVScales(one, one)] * self.model.config.num_layers

    def padding(self, bucket: Bucket) -> DeviceBatch:
        """A batch without live tokens, with one row that counts as sampled."""
        return DeviceBatch.padding(bucket, self.buckets, self.max_pages, num_rows=1)

    def programs(self) -> list[Program]:
        """Every program of the ladders, the slowest to compile first."""
        tokens, rows = reversed(self.buckets.tokens), reversed(self.buckets.rows)
        return [
            *(program for t in tokens for program in self.token_programs(t)),
            *(self.sample_program(r) for r in rows),
        ]

    def token_programs(self, num_tokens: int) -> list[Program]:
        """The programs of one rung of T.

        `layers` gives back its input and its pages: both are donated.
        """
        inputs = forward_inputs(self.padding(Bucket(num_tokens, 1)))
        params = self.model.abstract_params
        x = jax.ShapeDtypeStruct((num_tokens, self.model.config.hidden_size), self.dtype)
        run = slice(self.layers_per_program)
        scales = self.abstract_scales()
        return [
            Program(
                key=("layers", num_tokens),
                function=self.model.layers,
                arguments=(
                    self.model.layer_params(params)[run],
                    self.abstract_pages()[run],
                    x,
                    inputs.positions,
                    inputs.rows,
                    None if scales is None else scales[run],
                ),
                donated=(1, 2),
            ),
            Program(
                key=("embed", num_tokens),
                function=self.model.embed,
                arguments=(params["embed"], inputs.token_ids),
            ),
            Program(
                key=("select", num_tokens), function=select_rows, arguments=(x, inputs.logit_rows)
            ),
        ]

    def sample_program(self, num_rows: int) -> Program:
        """The program of one rung of R."""
        hidden_shape = (self.buckets.max_num_seqs, self.model.config.hidden_size)
        hidden = jax.ShapeDtypeStruct(hidden_shape, self.dtype)
        rows = sampling_rows(self.padding(Bucket(1, num_rows)))
        return Program(
            key=("sample", num_rows),
            function=functools.partial(sample_rows, self.model),
            arguments=(self.model.head_params(self.model.abstract_params), hidden, rows),
        )


def largest_step_bytes(shapes: StepShapes) -> int:
    """Device memory, in bytes, that the largest step takes beyond params and pages.

    Compiles the largest programs against whatever small pool `shapes` names: the pool's size hardly
    matters to it.
    """
    table = ProgramTable()
    largest = [
        *shapes.token_programs(shapes.buckets.tokens[-1]),
        shapes.sample_program(shapes.buckets.rows[-1]),
    ]
    table.compile_all(largest)
    sizes = []
    for program in largest:
        analysis = table[program.key].memory_analysis()
        assert analysis is not None, f"no memory analysis of {program.key} on this platform"
        sizes.append(
            analysis.temp_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
        )
    return int(max(sizes))


class DeviceExecutor:
    """Runs batches on one device.

    Args:
        shapes: what to compile.
        params: weights, on the device, as `shapes.model.abstract_params` says.
        kv_scales: for 8-bit pages one per layer, on the device; else None.
        check_batches: debug mode: refuse a batch whose pages, lengths or counts do not fit.
    """

    def __init__(
        self,
        shapes: StepShapes,
        params: Params,
        *,
        kv_scales: Sequence[KVScales] | None = None,
        check_batches: bool = False,
    ):
        self.kv_scales = kv_scales
        self._shapes = shapes
        self._params = params
        self._layer_params = shapes.model.layer_params(params)
        self._head_params = shapes.model.head_params(params)
        size, num_layers = shapes.layers_per_program, len(self._layer_params)
        self._runs = [slice(begin, begin + size) for begin in range(0, num_layers, size)]
        self._check_batches = check_batches
        self._kv_pages: list[KVPages] = []
        self._programs = ProgramTable()
        self.compile_s = 0.0
        self.warm_s = 0.0

    @property
    def description(self) -> dict[str, object]:
        """What serves: attention_backend, attention_interpret, dtype, kv_cache_dtype, platform,
        num_programs.
        """
        kernel = self._shapes.model.kernel
        return {
            "attention_backend": kernel.backend,
            "attention_interpret": kernel.interpret,
            "dtype": jnp.dtype(self._shapes.dtype).name,
            "kv_cache_dtype": self._shapes.kv_cache_dtype,
            "platform": jax.default_backend(),
            "num_programs": len(self._programs),
        }

    def warm_up(self) -> None:
        """Compiles every program, makes the pages, and runs each program once on padding alone.

        One run of layers is enough for that: the others use the same program.
        """
        begin = time.monotonic()
        self._programs.compile_all(self._shapes.programs())
        compiled = time.monotonic()
        self.reset()
        tokens, rows = self._shapes.buckets.tokens, self._shapes.buckets.rows
        for num_tokens in tokens:
            self._submit(
                self._shapes.padding(Bucket(num_tokens, rows[-1])), self._runs[:1]
            ).result()
        for num_rows in rows[:-1]:
            self._submit(self._shapes.padding(Bucket(tokens[0], num_rows)), self._runs[:1]).result()
        self.compile_s = compiled - begin
        self.warm_s = time.monotonic() - compiled

    def reset(self) -> None:
        """Makes the pages anew: a step cut short may have donated some and never got them back."""
        self._kv_pages = []  # first give up what is left of the old ones: two pools may not fit
        self._kv_pages = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._shapes.abstract_pages()
        )

    def submit(self, batch: DeviceBatch) -> DeviceStep:
        """Starts a step; returns before it is done where the platform allows.

        Raises:
            ValueError: in debug mode, a batch that a kernel may not trust; nothing was started.
        """
        if self._check_batches:
            check_rows(
                batch.kv_lens,
                batch.page_table,
                batch.kv_starts,
                batch.cu_q_lens,
                batch.ranges,
                num_tokens=batch.bucket.num_tokens,
                num_pages=self._shapes.num_pages,
                page_size=self._shapes.page_size,
            )
        return self._submit(batch, self._runs)

    def _submit(self, batch: DeviceBatch, runs: Sequence[slice]) -> DeviceStep:
        num_tokens = batch.bucket.num_tokens
        inputs = jax.device_put(forward_inputs(batch))
        x = self._programs["embed", num_tokens](self._params["embed"], inputs.token_ids)
        run_layers = self._programs["layers", num_tokens]
        for run in runs:
            x, self._kv_pages[run] = run_layers(
                self._layer_params[run],
                self._kv_pages[run],
                x,
                inputs.positions,
                inputs.rows,
                None if self.kv_scales is None else self.kv_scales[run],
            )
        hidden = self._programs["select", num_tokens](x, inputs.logit_rows)
        outputs = None
        if batch.num_rows:
            run_sample = self._programs["sample", batch.bucket.num_rows]
            outputs = run_sample(self._head_params, hidden, sampling_rows(batch))
        return DeviceStep(batch.num_rows, outputs, hidden)
