"""How positions turn into rotation frequencies: `RopeConfig`, a part of `ModelConfig`.

Made by `hf_config`; `model/rope.py` computes frequencies from it. Invariant: the frequencies of a
`RopeConfig` are the same for every text. Two kinds are defined by the length of the text ("dynamic",
"longrope"); keys that lie in a cache cannot be turned again when their text grows, so here they depend
on `context_len`, the longest text that is served: exactly what a text of that length gets.
"""

from dataclasses import dataclass, replace

from jaxserve.errors import CheckpointError, shown
from jaxserve.field_checks import is_int, is_real

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_BY_ORIGINAL = ("dynamic", "llama3", "yarn", "longrope")
_BY_CONTEXT = ("dynamic", "longrope")
MAX_FACTOR = (
    2**31 - 1
)  # a context that is stretched from one token to the longest that an i32 can count
LEAST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def check_float32(name: str, value: object) -> None:
    """Raises CheckpointError unless a number is > 0 in float32, in which layers compute: what that rounds
    to 0 or to infinity becomes NaN in a product or a quotient.
    """
    if not (is_real(value) and value > 0):  # type: ignore[operator]
        raise CheckpointError(f"{name} must be a finite number > 0, got {shown(value)}")
    if not LEAST_FLOAT32 <= value <= LARGEST_FLOAT32:  # type: ignore[operator]
        raise CheckpointError(
            f"{name} must be in [{LEAST_FLOAT32:g}, {LARGEST_FLOAT32:g}] as float32 is, "
            f"got {shown(value)}"
        )


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
        for name in ("original_max_position_embeddings", "context_len"):
            value = getattr(self, name)
            if value is not None and not (is_int(value) and 1 <= value <= MAX_FACTOR):
                raise CheckpointError(
                    f"rope {name} must be an integer in [1, {MAX_FACTOR}], got {shown(value)}"
                )
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
            check_float32(f"rope {name}", getattr(self, name))
        if self.factor > MAX_FACTOR:
            raise CheckpointError(f"rope factor must be <= {MAX_FACTOR}, got {self.factor!r}")
        if self.rope_type == "yarn" and self.theta <= 1:
            raise CheckpointError(
                f"rope theta must be > 1 for rope_type 'yarn', got {self.theta!r}"
            )
        partial = self.partial_rotary_factor
        if not (is_real(partial) and 0 < partial <= 1):
            raise CheckpointError(f"partial_rotary_factor must be in (0, 1], got {shown(partial)}")
        for name in ("short_factors", "long_factors"):
            values = getattr(self, name)
            if not isinstance(values, tuple):
                raise CheckpointError(
                    f"rope {name} must be a tuple of numbers, got {shown(values)}"
                )
            for value in values:
                check_float32(f"rope {name}", value)

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
