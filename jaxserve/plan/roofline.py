"""What a step costs on a chip that always reaches its peak: the clock of the simulator, the bounds of
`jaxserve plan`.

A step takes as long as the slower of its arithmetic and its memory traffic, and a fixed time besides
(Source: the roofline model, Williams, Waterman and Patterson, CACM 2009). Peaks are never reached,
so the seconds are lower bounds; the *ratio* of two schedules on one roofline is what this is for.
A step is four sums over its rows, see `work.py`.
"""

import math
from typing import NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.plan.chips import ChipSpec
from jaxserve.plan.models import ModelSpec
from jaxserve.plan.work import StepWork, num_pairs
from pallas_kernels.page_bytes import ITEM_BYTES

__all__ = ["Roofline", "StepTime", "num_pairs"]

# Launching a step, building its batch and reading its tokens back. An assumption, not a measurement:
# it keeps small steps from being free.
STEP_OVERHEAD_S = 1e-3
MEMORY_UTILIZATION = 0.9


class StepTime(NamedTuple):
    """Where the time of a step goes, seconds: it takes max(weights + kv, compute) + links + overhead."""

    weights_s: float  # reading the weights
    kv_s: float  # reading keys and values, and writing those of the step's tokens
    compute_s: float
    links_s: float  # all-reduces between the chips
    overhead_s: float

    @property
    def step_s(self) -> float:
        """Of the whole step."""
        return max(self.weights_s + self.kv_s, self.compute_s) + self.links_s + self.overhead_s

    @property
    def bound_by(self) -> str:
        """Which of them decides: "weights", "kv" or "compute"."""
        if self.compute_s >= self.weights_s + self.kv_s:
            return "compute"
        return "weights" if self.weights_s >= self.kv_s else "kv"


class Roofline:
    """One model on `num_chips` chips, its layers cut by heads over all of them (tensor parallel).

    Args:
        model: the shapes.
        chip: what one chip can do.
        num_chips: c; divides the query heads, the MLP and the vocabulary. Where there are fewer KV heads
            than chips each chip holds one, and reads and computes it.
        dtype: of weights and activations: "bfloat16" or "float32".
        kv_cache_dtype: of pages, a key of `config.KV_CACHE_DTYPES`.
        overhead_s: seconds a step takes whatever it does.

    Raises:
        ConfigError: num_chips chips cannot share the model.
    """

    def __init__(
        self,
        model: ModelSpec,
        chip: ChipSpec,
        *,
        num_chips: int = 1,
        dtype: str = "bfloat16",
        kv_cache_dtype: str = "auto",
        overhead_s: float = STEP_OVERHEAD_S,
    ):
        self.model = model
        self.chip = chip
        self.num_chips = num_chips
        self.overhead_s = overhead_s
        self.item_bytes = ITEM_BYTES[dtype]
        self.part = model.of_one_chip(num_chips)
        self.work = StepWork.of(self.part, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
        self.flops_per_s = chip.flops_per_s(dtype)
        # Seconds of one of each sum: hundreds of thousands of simulated steps multiply and add.
        work, bandwidth = self.work, chip.hbm_bytes_per_s
        self._token_flops_s = work.flops_per_token / self.flops_per_s
        self._row_flops_s = work.flops_per_row / self.flops_per_s
        self._pair_flops_s = work.flops_per_pair / self.flops_per_s
        self._layer_bytes_s = work.layer_bytes / bandwidth
        self._head_bytes_s = work.head_bytes / bandwidth
        self._kv_byte_s = work.kv_bytes_per_token / bandwidth
        self._token_link_s = self._all_reduce_bytes_per_token() / chip.link_bytes_per_s

    def _all_reduce_bytes_per_token(self) -> float:
        """Bytes each chip sends per token: two all-reduces of E elements a layer, as rings.

        A ring all-reduce of n bytes over c chips sends 2 * (c - 1) / c * n from each of them.
        """
        share = 2 * (self.num_chips - 1) / self.num_chips
        return 2 * self.model.num_layers * share * self.model.hidden_size * self.item_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, each once."""
        return self.model.num_params * self.item_bytes

    @property
    def chip_weight_bytes(self) -> int:
        """Bytes of the parameters that one chip holds."""
        return self.part.num_params * self.item_bytes

    @property
    def ridge_batch(self) -> int:
        """The fewest tokens in a step that keep a chip's arithmetic as busy as reading its weights keeps
        its memory: ceil(peak * item bytes / (2 * bandwidth)), the same for every model.
        """
        return math.ceil(self.flops_per_s * self.item_bytes / (2 * self.chip.hbm_bytes_per_s))

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers, on one chip, padding not counted."""
        return self.work.kv_bytes_per_token * page_size

    def num_pages_that_fit(
        self, page_size: int, memory_utilization: float = MEMORY_UTILIZATION
    ) -> int:
        """Pages, the null page included, in what the weights leave of the chips' memory.

        floor((memory_utilization * hbm_bytes - weight bytes of a chip) / page_bytes)

        Args:
            page_size: tokens a page.
            memory_utilization: share of the memory that may be used.

        Raises:
            ConfigError: the weights leave room for less than two pages.
        """
        free = memory_utilization * self.chip.hbm_bytes - self.chip_weight_bytes
        num_pages = int(free // self.page_bytes(page_size))
        if num_pages < 2:
            raise ConfigError(
                f"{self.num_chips} chips of {self.chip.hbm_bytes / 1e9:.4g} GB hold no page of "
                f"{page_size} tokens beside {self.weight_bytes / 1e9:.4g} GB of weights "
                f"(memory_utilization {memory_utilization:g}); more chips, or num_pages, change that"
            )
        return num_pages

    def step_time(
        self,
        *,
        num_tokens: int,
        num_logit_rows: int,
        num_context_tokens: float,
        num_pairs: float,
    ) -> StepTime:
        """Where the time of one step goes; on each of c chips, with P the parameters it holds,

            compute = (2 * P_layers * T + 2 * V*E/c * R + 4 * L*H/c*D * pairs) / peak
            weights = (bytes of P_layers, and of V*E/c if R > 0) / bandwidth
            kv      = (context + T) * KV bytes a token on a chip / bandwidth
            links   = 2L * 2(c-1)/c * T*E * item bytes / link bandwidth

        Args:
            num_tokens: T; num_logit_rows: R; num_context_tokens, num_pairs: see `work.py`.
        """
        return StepTime(
            weights_s=self._layer_bytes_s + (self._head_bytes_s if num_logit_rows else 0.0),
            kv_s=self._kv_byte_s * (num_context_tokens + num_tokens),
            compute_s=self._token_flops_s * num_tokens
            + self._row_flops_s * num_logit_rows
            + self._pair_flops_s * num_pairs,
            links_s=self._token_link_s * num_tokens,
            overhead_s=self.overhead_s,
        )

    def step_s(
        self,
        *,
        num_tokens: int,
        num_logit_rows: int,
        num_context_tokens: float,
        num_pairs: float,
    ) -> float:
        """Seconds of one step; arguments as `step_time`."""
        return self.step_time(
            num_tokens=num_tokens,
            num_logit_rows=num_logit_rows,
            num_context_tokens=num_context_tokens,
            num_pairs=num_pairs,
        ).step_s

    def slice_s(self, start: int, num_tokens: int) -> float:
        """Seconds of a step that does nothing but one slice of a prompt, its last token sampled.

        Args:
            start: tokens before the slice.
            num_tokens: tokens of the slice.
        """
        return self.step_s(
            num_tokens=num_tokens,
            num_logit_rows=1,
            num_context_tokens=start + num_tokens,
            num_pairs=num_pairs(start, num_tokens),
        )

    def page_move_s(self, page_size: int) -> float:
        """Seconds to move one page between device and host, one way: page bytes / host bandwidth.

        Every chip has its own link and moves its own share.
        """
        return self.page_bytes(page_size) / self.chip.host_bytes_per_s

    def page_copy_s(self, page_size: int) -> float:
        """Seconds to copy one page on the device: it is read once and written once."""
        return 2 * self.page_bytes(page_size) / self.chip.hbm_bytes_per_s
