"""How positions turn into rotation frequencies: `RopeConfig`, a part of `ModelConfig`.

Made by `hf_config`; `model/rope.py` computes frequencies from it. Invariant: the frequencies of a
`RopeConfig` are the same for every text. Two kinds are defined by the length of the text ("dynamic",
"longrope"); keys that lie in a cache cannot be turned again when their text grows, so here they depend
on `context_len`, the longest text that is served: exactly what a text of that length gets.
"""

import math
from dataclasses import dataclass, replace

from jaxserve.errors import CheckpointError, shown

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_BY_ORIGINAL = ("dynamic", "llama3", "yarn", "longrope")
_BY_CONTEXT = ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Args:
        theta: base of the geometric series of wavelengths.
        rope_type: "default", "linear" (every frequency divided by factor), "dynamic" (theta grows with
            the context), "llama3" (only the low ones are divided), "yarn" (likewise, by a ramp over
            dimensions) or "longrope" (each divided by a factor of its own).
        factor: context extension; 1.0 for "default" and "longrope".
        low_freq_factor, high_freq_factor: ends of the smooth band of "llama3", in turns over the
            original context.
        beta_fast, beta_slow: ends of the ramp of "yarn", in turns over the original context.
        truncate: whether the ramp of "yarn" begins and ends at whole dimensions.
        short_factors, long_factors: of "longrope", one per frequency: for a context_len up to the
            original context, and beyond.
        original_max_position_embeddings: context of the pre-training in tokens; None for "default" and
            "linear".
        context_len: longest text that is served, in tokens ("dynamic" and "longrope", else None).
        attention_factor: sine and cosine are multiplied by it ("yarn" and "longrope").
        partial_rotary_factor: the part of a head's dimensions, from the first, that is turned.

    Raises:
        CheckpointError: a field lies outside its range.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    original_max_position_embeddings: int | None = None
    context_len: int | None = None
    attention_factor: float = 1.0
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise CheckpointError(
                f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {self.rope_type!r}"
            )
        self._check_numbers()
        for name, types in (
            ("original_max_position_embeddings", _BY_ORIGINAL),
            ("context_len", _BY_CONTEXT),
        ):
            if self.rope_type in types and getattr(self, name) is None:
                raise CheckpointError(f"rope_type {self.rope_type!r} needs {name}, got None")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise CheckpointError(
                f"rope low_freq_factor must be < high_freq_factor ({self.high_freq_factor}),"
                f" got {self.low_freq_factor}"
            )
        if self.rope_type == "yarn" and self.beta_slow > self.beta_fast:
            raise CheckpointError(
                f"rope beta_slow must be <= beta_fast ({self.beta_fast}), got {self.beta_slow}"
            )

    def _check_numbers(self) -> None:
        for name in (
            "theta",
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise CheckpointError(f"rope {name} must be a finite number > 0, got {value!r}")
        if not 0 < self.partial_rotary_factor <= 1:
            raise CheckpointError(
                f"partial_rotary_factor must be in (0, 1], got {self.partial_rotary_factor!r}"
            )
        for name in ("short_factors", "long_factors"):
            values = getattr(self, name)
            if not all(math.isfinite(value) and value > 0 for value in values):
                raise CheckpointError(
                    f"rope {name} must be finite numbers > 0, got {shown(list(values))}"
                )

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's dimensions are turned.

        Args:
            head_dim: D.

        Raises:
            CheckpointError: it is odd or none, or "longrope" has not a factor for each pair.
        """
        dim = int(head_dim * self.partial_rotary_factor)
        if dim < 2 or dim % 2:
            whole = self.partial_rotary_factor == 1.0
            of = "" if whole else f" * partial_rotary_factor ({self.partial_rotary_factor})"
            raise CheckpointError(
                f"head_dim{of} must be even (rope turns pairs), got {head_dim if whole else dim}"
            )
        if self.rope_type == "longrope":
            for name in ("short_factors", "long_factors"):
                count = len(getattr(self, name))
                if count != dim // 2:
                    raise CheckpointError(
                        f"rope {name} must be {dim // 2} numbers, one per pair of dimensions,"
                        f" got {count}"
                    )
        if self.rope_type == "dynamic" and dim < 4:
            raise CheckpointError(f"rope_type 'dynamic' needs head_dim >= 4, got {dim}")
        return dim

    def at_context(self, context_len: int) -> "RopeConfig":
        """The same for texts up to a length.

        Args:
            context_len: in tokens.
        """
        if self.context_len is None:
            return self
        return replace(self, context_len=context_len)
