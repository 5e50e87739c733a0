"""The shapes and constants of a model: `ModelConfig`, read by every layer that needs a shape (model,
pages, plan, device).

Made by `hf_config` from what a checkpoint says, or by whoever embeds the engine. Pure: stdlib only, so
the planner and the scheduler can use it without a device.

Invariant: a `ModelConfig` that exists can be served. All families are one model with flags; what a
flag cannot say is refused where a config is read.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxserve.errors import CheckpointError, shown
from jaxserve.field_checks import is_int, is_real
from jaxserve.rope_config import RopeConfig, check_float32

ARCHITECTURES = (
    "llama",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "smollm3",
    "phi3",
    "granite",
    "seed_oss",
)
MAX_INT = 2**31 - 1  # sizes and ids travel as i32 on the device
# Every layer has an entry in the lists of parameters that are made before a header is compared with them.
MAX_LAYERS = 1024
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)
_FLAGS = ("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm")
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


class LayerKind(NamedTuple):
    """What of a layer is no weight. Layers of one kind run the same program.

    Args:
        window: a token sees itself and the `window - 1` before it; None = all before it.
        has_rope: whether queries and keys are turned by their positions.
    """

    window: int | None = None
    has_rope: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model. The defaults of flags are those of Llama.

    Args:
        architecture: the model family, one of `ARCHITECTURES`: how the tensors of its checkpoints are
            called. What is computed is said by the other fields alone.
        vocab_size: V, rows of the embedding.
        hidden_size: E.
        intermediate_size: F, width of the MLP.
        num_layers: L.
        num_heads: H, query heads.
        num_kv_heads: K; divides H. Query head h reads kv head h // (H / K).
        head_dim: D; even, and not necessarily E / H.
        max_position_embeddings: longest context in tokens.
        rms_norm_eps: added to the mean square inside every norm.
        rope: rotary position embedding.
        tie_word_embeddings: the head is the embedding transposed. `weights.load_params` may return
            False where the file holds a head that differs.
        qkv_bias: biases on q, k and v.
        o_bias: bias on o.
        mlp_bias: biases on gate, up and down.
        qk_norm: an RMS norm of each head of q and of k, with a scale [D] each, before rope.
        layer_windows: the sliding window of each layer in tokens, or None for a layer that sees all;
            None as a whole: every layer sees all.
        rope_layers: whether each layer turns its queries and keys; None: every one does.
        embedding_multiplier: embeddings are multiplied by it.
        residual_multiplier: so is what attention and MLP add to their input.
        attention_multiplier: and a query's products with keys; None for D ** -0.5.
        logits_scaling: logits are divided by it.
        eos_token_ids: the end ids of config.json and generation_config.json; the tokenizer's is
            added by `text`.
        bos_token_id: first id of a text, or None.
        dtype: what the checkpoint says its weights are stored in ("bfloat16"), or None; a hint for
            people only.

    Raises:
        CheckpointError: a field lies outside its range; the message names it, its value and the limit.
    """

    architecture: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] | None = None
    rope_layers: tuple[bool, ...] | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"architecture must be one of {', '.join(ARCHITECTURES)}, got {self.architecture!r}"
            )
        for name in _SIZES:
            limit = MAX_LAYERS if name == "num_layers" else MAX_INT
            _check_int(name, getattr(self, name), limit)
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads must be a multiple of num_key_value_heads ({self.num_kv_heads}),"
                f" got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even (rope turns pairs), got {self.head_dim}")
        if not isinstance(self.rope, RopeConfig):
            raise CheckpointError(f"rope must be a RopeConfig, got {shown(self.rope)}")
        self.rope.rotary_dim(self.head_dim)
        for name in _FLAGS:
            _check_bool(name, getattr(self, name))
        self._check_numbers()
        self._check_layers()

    def _check_numbers(self) -> None:
        eps = self.rms_norm_eps
        if not (is_real(eps) and eps >= 0):
            raise CheckpointError(f"rms_norm_eps must be a finite number >= 0, got {shown(eps)}")
        if eps:
            check_float32("rms_norm_eps", eps)
        attention = () if self.attention_multiplier is None else ("attention_multiplier",)
        for name in (*_MULTIPLIERS, *attention):
            check_float32(name, getattr(self, name))

    def _check_layers(self) -> None:
        for name in ("layer_windows", "rope_layers"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, tuple):
                raise CheckpointError(f"{name} must be a tuple or None, got {shown(given)}")
            if given is not None and len(given) != self.num_layers:
                raise CheckpointError(
                    f"{name} must be {self.num_layers} entries, one per layer, got {len(given)}"
                )
        for window in self.layer_windows or ():
            if window is not None:
                _check_int("sliding_window", window, MAX_INT)
        for has_rope in self.rope_layers or ():
            _check_bool("rope_layers", has_rope)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """One per layer, in order."""
        windows = self.layer_windows or (None,) * self.num_layers
        turned = self.rope_layers or (True,) * self.num_layers
        return tuple(LayerKind(*one) for one in zip(windows, turned, strict=True))

    @property
    def attention_scale(self) -> float:
        """A query's products with keys are multiplied by it."""
        return (
            self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier
        )

    @property
    def longest_context(self) -> int:
        """Most tokens that a text may have. Beyond max_position_embeddings only where rope extends it:
        "yarn" and "dynamic" reach `factor` times the original context, whatever the file says.
        """
        limit = self.max_position_embeddings
        if self.rope.rope_type in ("yarn", "dynamic"):
            original = self.rope.original_max_position_embeddings or limit
            limit = max(limit, min(int(original * self.rope.factor), MAX_INT))
        return limit

    def at_context(self, max_model_len: int) -> "ModelConfig":
        """The same model for texts up to a length: rope types that are defined by it are settled, and
        windows that nothing lies beyond are gone.

        Args:
            max_model_len: in tokens.
        """
        windows = self.layer_windows
        if windows is not None:
            windows = tuple(w if w is not None and w < max_model_len else None for w in windows)
            windows = windows if any(windows) else None
        return replace(self, rope=self.rope.at_context(max_model_len), layer_windows=windows)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise CheckpointError(f"{name} must be True or False, got {shown(value)}")


def _check_int(name: str, value: object, limit: int) -> None:
    if not (is_int(value) and 1 <= value <= limit):  # type: ignore[operator]
        raise CheckpointError(f"{name} must be an integer in [1, {limit}], got {shown(value)}")
