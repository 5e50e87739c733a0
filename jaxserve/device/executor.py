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

from jaxserve.device.kv_pool import count_table_program, make_pools, pool_program
from jaxserve.device.page_moves import PageMoves
from jaxserve.device.params import ParamPlacer, find_deleted, put_params
from jaxserve.device.programs import Lowering, Program, ProgramTable, lower_traced
from jaxserve.device.row_sampler import RowSampler
from jaxserve.device.scorer import Scorer
from jaxserve.device.shared_inputs import SharedInputs
from jaxserve.device.step import Embedded, StillInputs, moving_inputs
from jaxserve.device.step_result import DeviceStep, StepOutputs
from jaxserve.device.step_shapes import StepShapes
from jaxserve.executor import StepCosts
from jaxserve.model.kv_scales import KVScales
from jaxserve.model.registry import Params
from jaxserve.schedule.batch import CountLoad, DeviceBatch, Penalties
from jaxserve.schedule.buckets import Bucket
from pallas_kernels.ragged_paged_attention.layout import KVPages
from pallas_kernels.ragged_paged_attention.row_checks import check_rows

# (the name of a program, the layers that it is called for)
Run = tuple[str, slice]


class DeviceExecutor:
    """Runs batches on the devices of `shapes.placement`.

    Args:
        shapes: what to compile.
        params: weights, on the devices, as `shapes.served_params` says.
        kv_scales: for 8-bit pages one per layer, on the device; else None.
        num_host_pages: pages in host RAM that batches may move pages to; 0 = none.
        check_batches: debug mode: refuse a batch whose pages, lengths or counts do not fit.
        lower: how programs are lowered: traced, or taken from a `ProgramStore`.
    """

    def __init__(
        self,
        shapes: StepShapes,
        params: Params,
        *,
        kv_scales: Sequence[KVScales] | None = None,
        num_host_pages: int = 0,
        check_batches: bool = False,
        lower: Lowering = lower_traced,
    ):
        self.kv_scales = kv_scales
        self._shapes = shapes
        self._runs: list[Run] = list(zip(shapes.run_programs, shapes.runs, strict=True))
        first = dict(reversed(self._runs))  # of each program
        self._sample_runs = list(first.items())
        self._check_batches = check_batches
        self._kv_pages: list[KVPages] = []
        self._programs = ProgramTable(lower)
        self._moves = PageMoves(shapes, self._programs, num_host_pages=num_host_pages)
        self._inputs = SharedInputs(shapes.placement)
        self._sampler = RowSampler(shapes, self._programs, self._inputs)
        self._scorer = Scorer(shapes, self._programs)
        self._last: DeviceStep | None = None
        self._costs: StepCosts | None = None
        self._take_params(params)
        self.compile_s = 0.0
        self.warm_s = 0.0

    @property
    def description(self) -> dict[str, object]:
        """What serves: attention_backend, attention_interpret, dtype, kv_cache_dtype, platform,
        tensor_parallel_size, num_programs.
        """
        kernel = self._shapes.model.kernel
        return {
            "attention_backend": kernel.backend,
            "attention_interpret": kernel.interpret,
            "dtype": jnp.dtype(self._shapes.dtype).name,
            "kv_cache_dtype": self._shapes.kv_cache_dtype,
            "platform": self._shapes.placement.platform,
            "tensor_parallel_size": self._shapes.placement.shares.heads,
            "num_programs": len(self._programs),
        }

    @property
    def programs(self) -> ProgramTable:
        """What steps call; for profiles."""
        return self._programs

    @property
    def costs(self) -> StepCosts:
        """As measured by `warm_up`; page_move_s is infinite where there are no host pages.

        Raises:
            RuntimeError: before `warm_up`.
        """
        if self._costs is None:
            raise RuntimeError("costs are measured by warm_up, which has not run")
        return self._costs

    def list_programs(self) -> list[Program]:
        """All that `warm_up` compiles, the slowest first."""
        return [
            *self._shapes.programs(),
            *self._moves.list_programs(),
            pool_program(self._shapes),
            count_table_program(self._shapes),
        ]

    def warm_up(self) -> None:
        """Compiles every program, makes the pages, runs each program once on padding alone, and
        measures `costs`.

        One run of layers is enough for each program that takes some: the others use the same. A step
        that samples nothing runs the programs of T alone, so no rung of R runs more than once.
        """
        begin = time.monotonic()
        self._programs.compile_all(self.list_programs())
        compiled = time.monotonic()
        self.reset()
        tokens, rows = self._shapes.buckets.tokens, self._shapes.buckets.rows
        for num_tokens in tokens:
            self._run_padding(Bucket(num_tokens, rows[0]), samples=False)
        for num_rows in rows:
            self._run_padding(Bucket(tokens[0], num_rows), samples=True)
        self._scorer.warm_up(self._head_params)
        page_move_s = self._moves.warm_up(self._kv_pages)
        self._costs = StepCosts(token_s=self._measure_token(), page_move_s=page_move_s)
        self.compile_s = compiled - begin
        self.warm_s = time.monotonic() - compiled

    def _run_padding(self, bucket: Bucket, *, samples: bool) -> None:
        padding = DeviceBatch.padding(
            bucket, self._shapes.buckets, self._shapes.max_pages, num_rows=int(samples)
        )
        padding = dataclasses.replace(padding, wants_candidates=True)
        if samples:
            slots, seqs = np.arange(1, dtype=np.int32), self._shapes.buckets.max_num_seqs
            padding = dataclasses.replace(
                padding,
                penalties=Penalties.off(bucket.num_rows, seqs),
                count_loads=(CountLoad(0, slots, slots),),
                awaits_masks=True,
            )
        step = self._submit(padding, self._sample_runs)
        if samples:
            step.give_masks(np.full((1, 1), 1, np.uint32))
        step.result()

    def _measure_token(self) -> float:
        """Seconds a token in the largest step, which has run before: one run of layers of each program
        stands for all. Padding costs what tokens do but for attention over a long context.
        """
        num_tokens = self._shapes.buckets.tokens[-1]
        begin = time.perf_counter()
        self._run_padding(Bucket(num_tokens, self._shapes.buckets.rows[0]), samples=False)
        share = len(self._sample_runs) / len(self._runs)
        return (time.perf_counter() - begin) / share / num_tokens

    def reset(self) -> None:
        """Makes the pages anew: a step cut short may have donated some and never got them back.
        What host pages hold means nothing afterwards either.
        """
        self._last = None
        self._moves.storage.forget()
        self._kv_pages = []  # first give up what is left of the old ones: two pools may not fit
        self._sampler.reset()
        self._kv_pages = make_pools(self._shapes, self._programs)

    def prepare_params(self, params: object) -> Params:
        """Other weights of the same model, for `use_params`.

        Args:
            params: as `build.LoadedModel.params`. numpy arrays may change afterwards; arrays on the
                device are shared, so donate them to nothing. Until `use_params` old and new weights are
                on the device together.

        Raises:
            ConfigError: a leaf at fault, by name.
        """
        model = self._shapes.model
        place = ParamPlacer(model, self._shapes.placement)
        return put_params(params, model.given_params, own=True, pack=model.layout, place=place)

    def use_params(self, prepared: Params) -> None:
        """Other weights from the next step on. Pages keep what the old ones computed, and an 8-bit KV
        cache its scales: both are the caller's to judge.

        Args:
            prepared: from `prepare_params`.

        Raises:
            RuntimeError: a step is under way.
        """
        if self._last is not None and not self._last.is_done:
            raise RuntimeError("use_params: a step is under way; wait for its result first")
        self._take_params(prepared)

    def release(self, *, params: bool) -> None:
        """Gives up the pages, the table that penalties read and what is in host RAM, until `reset`.

        Args:
            params: the weights too, until `use_params`; who shares them keeps them.
        """
        self._last = None
        self._kv_pages = []
        self._sampler.release()
        self._moves.storage.release()
        if params:
            self._params, self._layer_params, self._head_params = {}, [], {}

    def _take_params(self, params: Params) -> None:
        layers = self._shapes.model.layer_params(params)
        head = self._shapes.model.head_params(params)
        # Stores and no call: an interrupt leaves the old weights or the new ones, never some of each.
        self._params, self._layer_params, self._head_params = params, layers, head

    def submit(self, batch: DeviceBatch) -> DeviceStep:
        """Starts a step; returns before it is done where the platform allows.

        Raises:
            ValueError: moves to or from host pages where there are none; in debug mode, a batch
                that a kernel may not trust. Nothing was started.
        """
        if self._check_batches:
            self._moves.check(batch)
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
        self._moves.start(batch, self._kv_pages)
        try:
            return self._submit(batch, self._runs)
        except RuntimeError as error:
            name = find_deleted(self._params)
            if name is None:
                raise
            raise RuntimeError(
                f"{name} was donated or deleted by its owner, and the engine shares it: donate a copy, "
                "or give it other weights with update_params"
            ) from error

    def _submit(self, batch: DeviceBatch, runs: Sequence[Run]) -> DeviceStep:
        outputs, sample = [], None
        if batch.awaits_masks:  # a single step
            forward, hidden = self._run_layers(batch, runs)
            outputs.append(forward)
            sample = functools.partial(
                self._sampler, batch, self._head_params, hidden, forward.slices_finite
            )
        else:
            outputs.append(self._run(batch, runs))
        while batch.num_steps > 1:
            batch = batch.following()
            outputs.append(self._run(batch, runs))
        settle = self._moves.storage.settle
        self._last = DeviceStep(batch, outputs, settle=settle, sample=sample)
        return self._last

    def _run(self, batch: DeviceBatch, runs: Sequence[Run]) -> StepOutputs:
        """Calls the programs of one step, one after the other; waits for none of them."""
        outputs, hidden = self._run_layers(batch, runs)
        if batch.num_rows:
            rows = self._sampler(batch, self._head_params, hidden, outputs.slices_finite)
            outputs = outputs._replace(rows=rows)
        return outputs

    def _run_layers(self, batch: DeviceBatch, runs: Sequence[Run]) -> tuple[StepOutputs, jax.Array]:
        """The programs of T. Returns (what is known then, the hidden rows [S, E] for the sampler)."""
        num_tokens = batch.bucket.num_tokens
        still = self._inputs.put(StillInputs.of(batch))
        embed = self._programs["embed", num_tokens]
        x, positions, kv_lens = Embedded(
            *embed(self._params["embed"], moving_inputs(batch), self._sampler.last_ids)
        )
        rows = still.rows(kv_lens)
        for name, run in runs:
            x, self._kv_pages[run] = self._programs[name, num_tokens](
                self._layer_params[run],
                self._kv_pages[run],
                x,
                positions,
                rows,
                None if self.kv_scales is None else self.kv_scales[run],
            )
        select = self._programs["select", num_tokens]
        hidden, slices_finite = select(x, still.logit_rows, still.cu_q_lens)
        scored = list(self._scorer(batch, self._head_params, x)) if len(batch.score_rows) else ()
        return StepOutputs(slices_finite, scored=scored), hidden
