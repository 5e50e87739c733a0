"""What a step costs on a chip that always reaches its peak: the clock of the simulator.

A step takes as long as the slower of its arithmetic and its memory traffic, and a fixed time besides
(Source: the roofline model, Williams, Waterman and Patterson, CACM 2009). Peaks are never reached,
so the seconds are lower bounds; the *ratio* of two schedules on one roofline is what this is for.

Everything is a sum over the step's rows, so that a caller with hundreds of rows keeps four running
sums and pays nothing per row:

    num_tokens          T, tokens computed
    num_logit_rows      R, rows that sample
    num_context_tokens  sum over rows of the context they read, this step's tokens included
    num_pairs           sum over rows of (query, key) pairs: num_tokens * start + T * (T + 1) / 2
"""

from jaxserve.errors import ConfigError
from jaxserve.plan.chips import ChipSpec
from jaxserve.plan.models import ModelSpec

ITEM_BYTES = 2  # bfloat16 weights, activations and pages
# Launching a step, building its batch and reading its tokens back. An assumption, not a measurement:
# it keeps small steps from being free.
STEP_OVERHEAD_S = 1e-3
MEMORY_UTILIZATION = 0.9


def num_pairs(start: int, num_tokens: int) -> int:
    """(query, key) pairs of a causal slice: token i of it sees start + i + 1 keys.

    Args:
        start: tokens before the slice.
        num_tokens: tokens of the slice.
    """
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class Roofline:
    """One model on `num_chips` chips, its layers cut by heads over all of them (tensor parallel).

    Args:
        model: the shapes.
        chip: what one chip can do.
        num_chips: divides the query heads; each chip then holds ceil(K / num_chips) of the K KV
            heads, which are repeated where there are fewer of them than chips.
        overhead_s: seconds a step takes whatever it does.

    Raises:
        ConfigError: num_chips does not divide the heads.
    """

    def __init__(
        self,
        model: ModelSpec,
        chip: ChipSpec,
        *,
        num_chips: int = 1,
        overhead_s: float = STEP_OVERHEAD_S,
    ):
        if num_chips < 1 or model.num_heads % num_chips:
            raise ConfigError(
                f"num_chips must divide the model's {model.num_heads} query heads, got {num_chips}"
            )
        self.model = model
        self.chip = chip
        self.num_chips = num_chips
        self.overhead_s = overhead_s
        kv_heads_per_chip = -(-model.num_kv_heads // num_chips)
        flops_per_s = chip.peak_flops_per_s * num_chips
        kv_bytes_per_chip = model.kv_bytes_per_token(ITEM_BYTES) * kv_heads_per_chip
        self._kv_bytes_per_chip = kv_bytes_per_chip // model.num_kv_heads
        # compute: a multiply-add is two operations; attention multiplies by keys and by values
        self._token_flops_s = 2 * model.num_layer_matmul_params / flops_per_s
        self._row_flops_s = 2 * model.num_head_params / flops_per_s
        heads = model.num_layers * model.num_heads * model.head_dim
        self._pair_flops_s = 4 * heads / flops_per_s
        # memory: weights once a step, the head only when a row samples, every row's context once
        bandwidth = chip.hbm_bytes_per_s
        head_bytes = model.num_head_params * ITEM_BYTES
        self._head_bytes_s = head_bytes / num_chips / bandwidth
        layer_bytes = model.num_layer_matmul_params * ITEM_BYTES
        self._layer_bytes_s = layer_bytes / num_chips / bandwidth
        self._kv_byte_s = self._kv_bytes_per_chip / bandwidth
        self._token_link_s = self._all_reduce_bytes_per_token() / chip.link_bytes_per_s

    def _all_reduce_bytes_per_token(self) -> float:
        """Bytes each chip sends per token: two all-reduces of E elements a layer, as rings.

        A ring all-reduce of n bytes over c chips sends 2 * (c - 1) / c * n from each of them.
        """
        share = 2 * (self.num_chips - 1) / self.num_chips
        return 2 * self.model.num_layers * share * self.model.hidden_size * ITEM_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, over all chips."""
        return self.model.num_params * ITEM_BYTES

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers, on one chip (where KV heads are not repeated, the
        whole page's bytes divided by num_chips).
        """
        return self._kv_bytes_per_chip * page_size

    def num_pages_that_fit(
        self, page_size: int, memory_utilization: float = MEMORY_UTILIZATION
    ) -> int:
        """Pages, the null page included, in what the weights leave of the chips' memory.

        floor((memory_utilization * hbm_bytes - weight_bytes / num_chips) / page_bytes)

        Args:
            page_size: tokens a page.
            memory_utilization: share of the memory that may be used.

        Raises:
            ConfigError: the weights leave room for less than two pages.
        """
        weights = self.weight_bytes / self.num_chips
        free = memory_utilization * self.chip.hbm_bytes - weights
        num_pages = int(free // self.page_bytes(page_size))
        if num_pages < 2:
            raise ConfigError(
                f"{self.num_chips} chips of {self.chip.hbm_bytes / 1e9:.4g} GB hold no page of "
                f"{page_size} tokens beside {self.weight_bytes / 1e9:.4g} GB of weights "
                f"(memory_utilization {memory_utilization:g}); more chips, or num_pages, change that"
            )
        return num_pages

    def step_s(
        self,
        *,
        num_tokens: int,
        num_logit_rows: int,
        num_context_tokens: int,
        num_pairs: int,
    ) -> float:
        """Seconds of one step.

        max(compute, memory) + all-reduces + overhead, where, with c chips,

            compute = (2 * P_layers * T + 2 * V*E * R + 4 * L*H*D * pairs) / (c * peak)
            memory  = (bytes of P_layers, and of V*E if R > 0) / (c * bandwidth)
                      + (context + T) * KV bytes a token on a chip / bandwidth
            all-reduces = 2L * 2(c-1)/c * T*E * item bytes / link bandwidth

        Args:
            num_tokens: T; num_logit_rows: R; num_context_tokens, num_pairs: see the module.
        """
        compute = (
            self._token_flops_s * num_tokens
            + self._row_flops_s * num_logit_rows
            + self._pair_flops_s * num_pairs
        )
        memory = self._layer_bytes_s + self._kv_byte_s * (num_context_tokens + num_tokens)
        if num_logit_rows:
            memory += self._head_bytes_s
        return max(compute, memory) + self._token_link_s * num_tokens + self.overhead_s

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
