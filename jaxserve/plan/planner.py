"""Will a model fit some chips, how many pages are left, how fast can it be at best: `make_plan`.

Called by `jaxserve plan`. Bytes are those that the engine's own allocator counts (`capacity`), by the page
layout and page size that the engine would choose on that chip; speeds are bounds on a roofline. Nothing here
needs a device or a checkpoint. Invariant: bytes are exact but for `step_bytes`, which is an estimate.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.errors import ConfigError, shown
from jaxserve.plan.capacity import pool_page_bytes
from jaxserve.plan.chips import ChipSpec
from jaxserve.plan.models import ModelSpec
from jaxserve.plan.roofline import Roofline, StepTime
from jaxserve.plan.work import PLANNED_DTYPES, keys_read, kv_item_dtype, num_pairs
from pallas_kernels import dispatch
from pallas_kernels.page_bytes import ITEM_BYTES, fills_tpu_words
from pallas_kernels.tpu_smem import check_smem

MAX_CHIPS = 4096
# Raw and processed logits, and what the sampler makes of them when it sorts; as XLA compiles it for TPUs.
_LOGITS_COPIES = 8


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What to plan.

    Args:
        model: the shapes.
        chip: what a chip can do and hold.
        num_chips: tensor parallel over so many.
        dtype: of weights and activations, one of `PLANNED_DTYPES`.
        cache: page_size (None = the engine's choice on that chip), memory_utilization, kv_cache_dtype.
        scheduler: max_num_seqs and max_num_batched_tokens, the largest step.
        max_model_len: most tokens of a sequence; None = the model's limit.
        num_prompt_tokens, num_output_tokens: lengths of the sequences that are counted.

    Raises:
        ConfigError: a value outside its range, or chips that cannot share the model.
    """

    model: ModelSpec
    chip: ChipSpec
    num_chips: int = 1
    dtype: str = "bfloat16"
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    max_model_len: int | None = None
    num_prompt_tokens: int = 1024
    num_output_tokens: int = 256

    def __post_init__(self) -> None:
        if self.dtype not in PLANNED_DTYPES:
            raise ConfigError(
                f"dtype must be one of {', '.join(PLANNED_DTYPES)}, got {shown(self.dtype)}"
            )
        if not 1 <= self.num_chips <= MAX_CHIPS:
            raise ConfigError(f"num_chips must be in [1, {MAX_CHIPS}], got {self.num_chips}")
        limit = self.model.max_position_embeddings
        if self.max_model_len is not None and not 2 <= self.max_model_len <= limit:
            raise ConfigError(
                f"max_model_len must be in [2, {limit}], the model's max_position_embeddings, "
                f"got {self.max_model_len}"
            )
        for name in ("num_prompt_tokens", "num_output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.sequence_tokens > self.longest:
            raise ConfigError(
                f"lengths: a prompt of {self.num_prompt_tokens} tokens and {self.num_output_tokens} "
                f"more pass max_model_len, {self.longest}"
            )

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return self.max_model_len or self.model.max_position_embeddings

    @property
    def sequence_tokens(self) -> int:
        """Prompt and output of one of the counted sequences."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in a step: each needs a token of it."""
        return min(self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens)

    @property
    def kv_dtype(self) -> str:
        """Element type of the pages by its numpy name."""
        return kv_item_dtype(self.cache.kv_cache_dtype, self.dtype)


class StepBound(NamedTuple):
    """The best that a kind of step can do.

    Args:
        num_tokens: in the step: of a decode step its sequences, of a prefill step tokens of prompts.
        tokens_per_s: of those.
        time: of the step.
    """

    num_tokens: int
    tokens_per_s: float
    time: StepTime


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What lies in the memory of one chip, bytes.

    Args:
        hbm_bytes: of the chip. usable_bytes: the share of it that memory_utilization allows.
        weight_bytes: of the params that it holds.
        step_bytes: what the largest step takes besides, an estimate; 0 on a CPU, where the allocator
            sets nothing aside.
        count_table_bytes: of the table that penalties read; likewise.
        page_bytes: of one page over all layers, padding included.
    """

    hbm_bytes: int
    usable_bytes: int
    weight_bytes: int
    step_bytes: int
    count_table_bytes: int
    page_bytes: int

    @property
    def free_bytes(self) -> int:
        """What is left for pages; negative where the weights do not fit."""
        taken = self.weight_bytes + self.step_bytes + self.count_table_bytes
        return self.usable_bytes - taken

    @property
    def resident_bytes(self) -> int:
        """Weights, table and pages: what stays from step to step."""
        return self.weight_bytes + self.count_table_bytes + self.num_pages * self.page_bytes

    @property
    def num_pages(self) -> int:
        """Pages that fit, the null page included; 0 where nobody could use one."""
        num_pages = self.free_bytes // self.page_bytes
        return num_pages if num_pages >= 2 else 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.

    Args:
        config: what was asked.
        backend, layout, page_size: what the engine would choose on that chip.
        memory: of one chip.
        ridge_batch: see `Roofline.ridge_batch`.
        ridge_batch_at_lengths: the same with the keys and values of the counted sequences, which have to
            be read too; None where no batch is bound by arithmetic.
        decode: bounds by batch, up to the largest that fits, ascending; the last is `decode_batch`.
        prefill: bounds by tokens in a step, ascending; the last is a full step.
    """

    config: PlanConfig
    backend: str
    layout: str
    page_size: int
    memory: Memory
    ridge_batch: int
    ridge_batch_at_lengths: int | None
    decode: tuple[StepBound, ...]
    prefill: tuple[StepBound, ...]

    @property
    def pages_per_sequence(self) -> int:
        """Pages of one of the counted sequences when it ends."""
        return -(-self.config.sequence_tokens // self.page_size)

    @property
    def max_concurrency(self) -> int:
        """Sequences of those lengths that the pool holds at once, each with all of its tokens."""
        return max(self.memory.num_pages - 1, 0) // self.pages_per_sequence

    @property
    def short_by_bytes(self) -> int:
        """Bytes that each chip lacks to hold weights, step and one such sequence; 0 where they fit."""
        needed = (1 + self.pages_per_sequence) * self.memory.page_bytes
        return max(needed - self.memory.free_bytes, 0)

    @property
    def fits(self) -> bool:
        """Whether one such sequence can be served."""
        return self.max_concurrency > 0

    @property
    def decode_batch(self) -> int:
        """Sequences of the largest decode step: as many as fit, at most max_num_seqs."""
        return min(self.max_concurrency, self.config.max_num_seqs)


def make_plan(config: PlanConfig) -> Plan:
    """Plans.

    Raises:
        ConfigError: chips that cannot share the model or its pages, a page size that the chip's kernel
            does not serve, or a page table that it has no room for.
    """
    backend, page_size = _choose_attention(config)
    layout = dispatch.layout_of(backend)
    _check_shared_pages(config, layout)
    roofline = Roofline(
        config.model,
        config.chip,
        num_chips=config.num_chips,
        dtype=config.dtype,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        overhead_s=0.0,
    )
    plan = Plan(
        config=config,
        backend=backend,
        layout=layout,
        page_size=page_size,
        memory=_memory(config, roofline.part, layout, page_size),
        ridge_batch=roofline.ridge_batch,
        ridge_batch_at_lengths=_ridge_at_lengths(config, roofline),
        decode=(),
        prefill=tuple(
            prefill_bound(config, roofline, num_tokens)
            for num_tokens in _doubling(128, config.scheduler.max_num_batched_tokens)
        ),
    )
    if not plan.fits:
        return dataclasses.replace(plan, prefill=())
    batches = _doubling(1, plan.decode_batch)
    decode = tuple(decode_bound(config, roofline, batch) for batch in batches)
    return dataclasses.replace(plan, decode=decode)


def fewest_chips(config: PlanConfig) -> int | None:
    """The fewest chips that can share the model and hold one sequence of those lengths; None where no
    number does.
    """
    for num_chips in range(1, config.model.num_heads + 1):
        try:
            if make_plan(dataclasses.replace(config, num_chips=num_chips)).fits:
                return num_chips
        except ConfigError:
            continue
    return None


def weight_bytes(model: ModelSpec) -> dict[str, int]:
    """Bytes of all parameters by element type."""
    return {name: model.num_params * ITEM_BYTES[name] for name in PLANNED_DTYPES}


def kv_bytes_per_token(config: PlanConfig) -> int:
    """Bytes of a token's keys and values: 2 * L * K * D * item bytes; each kv head once, unpadded."""
    return config.model.kv_bytes_per_token(ITEM_BYTES[config.kv_dtype])


def slice_sums(model: ModelSpec, start: int, num_tokens: int) -> tuple[float, float]:
    """(keys that a slice reads, its pairs), the mean over layers whose windows may differ.

    Args:
        model: the shapes.
        start: tokens before the slice.
        num_tokens: tokens of it.
    """
    context = pairs = 0.0
    for window, share in model.window_shares:
        context += share * float(keys_read(start, num_tokens, window))
        pairs += share * float(num_pairs(start, num_tokens, window))
    return context, pairs


def decode_bound(config: PlanConfig, roofline: Roofline, batch: int) -> StepBound:
    """A step with one token of each of `batch` sequences halfway through their outputs."""
    before = config.num_prompt_tokens + config.num_output_tokens // 2 - 1
    context, pairs = slice_sums(config.model, before, 1)
    time = roofline.step_time(
        num_tokens=batch,
        num_logit_rows=batch,
        num_context_tokens=batch * context,
        num_pairs=batch * pairs,
    )
    return StepBound(batch, batch / time.step_s, time)


def prefill_bound(config: PlanConfig, roofline: Roofline, num_tokens: int) -> StepBound:
    """Prompts computed in steps of `num_tokens`: as many whole ones as a step holds, or one of them in
    chunks, of which the mean is taken.
    """
    prompt = config.num_prompt_tokens
    starts = range(0, prompt, num_tokens)
    times = []
    for start in starts:
        chunk = min(num_tokens, prompt - start)
        count = max(num_tokens // prompt, 1)
        context, pairs = slice_sums(config.model, start, chunk)
        times.append(
            roofline.step_time(
                num_tokens=count * chunk,
                num_logit_rows=count if start + chunk == prompt else 0,
                num_context_tokens=count * context,
                num_pairs=count * pairs,
            )
        )
    total_s = sum(time.step_s for time in times)
    computed = max(num_tokens // prompt, 1) * prompt
    mean = StepTime(*(sum(parts) / len(times) for parts in zip(*times, strict=True)))
    return StepBound(num_tokens, computed / total_s, mean)


def _choose_attention(config: PlanConfig) -> tuple[str, int]:
    """(backend, page size), as the engine chooses them."""
    demand = dispatch.Demand(
        platform=config.chip.platform,
        compute_capability=config.chip.compute_capability,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        head_dim=config.model.head_dim,
    )
    try:
        backend = dispatch.resolve_backend("auto", demand)
        page_size = config.cache.page_size or dispatch.pick_page_size(
            backend, max_num_seqs=config.max_num_seqs, max_model_len=config.longest
        )
        dispatch.check_page_size(backend, page_size)
        if backend == "tpu":
            pages_per_row = -(-config.longest // page_size)
            check_smem(config.max_num_seqs, pages_per_row, config.model.num_kv_heads)
        return backend, page_size
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(str(error)) from None


def _check_shared_pages(config: PlanConfig, layout: str) -> None:
    """Refuses what `sharding.local_kv_heads` refuses: chips whose heads leave words of their pages half
    empty.
    """
    if layout != "tpu" or config.num_chips == 1:
        return
    part = config.model.of_one_chip(config.num_chips)
    if not fills_tpu_words(part.num_kv_heads, part.head_dim, ITEM_BYTES[config.kv_dtype]):
        raise ConfigError(
            f"num_chips={config.num_chips}: the {part.num_kv_heads} of {config.model.num_kv_heads} kv "
            f"heads that each chip holds, with head_dim {part.head_dim} and {config.kv_dtype} pages, do "
            "not fill whole words of page layout 'tpu'; fewer chips or a wider kv_cache_dtype do"
        )


def _memory(config: PlanConfig, part: ModelSpec, layout: str, page_size: int) -> Memory:
    """Of one chip, which holds `part` of the model."""
    item_bytes = ITEM_BYTES[config.dtype]
    on_cpu = config.chip.platform == "cpu"
    table = 4 * config.max_num_seqs * part.vocab_size
    return Memory(
        hbm_bytes=config.chip.hbm_bytes,
        usable_bytes=int(config.chip.hbm_bytes * config.cache.memory_utilization),
        weight_bytes=part.num_params * item_bytes,
        step_bytes=0 if on_cpu else step_bytes(config, part),
        count_table_bytes=0 if on_cpu else table,
        page_bytes=pool_page_bytes(part, layout=layout, page_size=page_size, dtype=config.kv_dtype),
    )


def step_bytes(config: PlanConfig, part: ModelSpec) -> int:
    """About what the largest step takes beyond params and pages: the larger of the activations of its
    tokens and the logits of its rows, f32, a few times.
    """
    item_bytes = ITEM_BYTES[config.dtype]
    width = 2 * part.intermediate_size + 6 * part.hidden_size
    activations = config.scheduler.max_num_batched_tokens * width * item_bytes
    logits = 4 * config.max_num_seqs * part.vocab_size * _LOGITS_COPIES
    return max(activations, logits)


def _ridge_at_lengths(config: PlanConfig, roofline: Roofline) -> int | None:
    """The smallest batch whose arithmetic takes as long as its memory traffic."""
    one, two = (decode_bound(config, roofline, batch).time for batch in (1, 2))
    gain = (two.compute_s - one.compute_s) - (two.kv_s - one.kv_s)
    return math.ceil(one.weights_s / gain) if gain > 0 else None


def _doubling(begin: int, end: int) -> list[int]:
    """begin, twice that, ... and end."""
    rungs = itertools.takewhile(lambda rung: rung < end, (begin << i for i in itertools.count()))
    return [*rungs, end]
