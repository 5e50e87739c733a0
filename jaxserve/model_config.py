"""What a checkpoint says about its model: `ModelConfig`, read from a Hugging Face config.json.

Built once by `weights`, then read by every layer that needs a shape (model, pages, plan, device). Pure:
stdlib only, so the planner and the scheduler can use it without a device.

Invariant: a `ModelConfig` that exists can be served. What the model code does not compute is
refused here by key, value and limit, never ignored: an ignored rope type or quantisation gives
fluent nonsense instead of an error.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import CheckpointError, shown

# model_type of config.json -> the class name it must come with. More families join here together
# with their model.
_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
_ROPE_TYPES = ("default", "linear", "llama3")
_ROPE_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
    }
)
_MAX_INT = 2**31 - 1  # sizes and ids travel as i32 on the device
# Every layer has an entry in the lists of parameters that are made before a header is compared with them.
MAX_LAYERS = 1024


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions turn into rotation frequencies; `model/rope.py` computes them from this.

    Args:
        theta: base of the geometric series of wavelengths.
        rope_type: "default", "linear" (every frequency divided by factor) or "llama3" (only the low ones).
        factor: context extension; 1.0 for "default".
        low_freq_factor, high_freq_factor: ends of the smooth band of "llama3", in turns over the
            original context.
        original_max_position_embeddings: context of the pre-training in tokens ("llama3" only, else None).

    Raises:
        CheckpointError: a field lies outside its range.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in _ROPE_TYPES:
            raise CheckpointError(
                f"rope_type must be one of {', '.join(_ROPE_TYPES)}, got {self.rope_type!r}"
            )
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise CheckpointError(f"rope {name} must be a finite number > 0, got {value!r}")
        if self.rope_type == "llama3":
            if self.original_max_position_embeddings is None:
                raise CheckpointError(
                    "rope_type 'llama3' needs original_max_position_embeddings, got None"
                )
            if self.low_freq_factor >= self.high_freq_factor:
                raise CheckpointError(
                    f"rope low_freq_factor must be < high_freq_factor ({self.high_freq_factor}),"
                    f" got {self.low_freq_factor}"
                )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model.

    Args:
        architecture: the model family, a key of the model registry ("llama").
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
        attention_bias: biases on q, k, v and o.
        mlp_bias: biases on gate, up and down.
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
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.architecture not in _ARCHITECTURES:
            raise CheckpointError(
                f"architecture must be one of {', '.join(_ARCHITECTURES)}, got {self.architecture!r}"
            )
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            limit = MAX_LAYERS if name == "num_layers" else _MAX_INT
            if not (_is_int(value) and 1 <= value <= limit):
                raise CheckpointError(
                    f"{name} must be an integer in [1, {limit}], got {shown(value)}"
                )
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads must be a multiple of num_key_value_heads ({self.num_kv_heads}),"
                f" got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even (rope turns pairs), got {self.head_dim}")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps >= 0):
            raise CheckpointError(
                f"rms_norm_eps must be a finite number >= 0, got {self.rms_norm_eps!r}"
            )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, source: str
    ) -> "ModelConfig":
        """Reads a Hugging Face config.json, in the spellings of transformers 4 and 5.

        A missing or null key takes the class default of transformers' `LlamaConfig`, but for eos
        and bos: those are facts about a tokenizer, so what no file states is not assumed.

        Args:
            config: the object of config.json.
            generation_config: the object of generation_config.json, or None; only its end ids are used.
            source: name of the file, for messages.

        Raises:
            CheckpointError: names source, key, value and limit.
        """
        keys = _Keys(config, source)
        architecture = _architecture(keys)
        _refuse_unserved(keys)
        hidden_size = keys.integer("hidden_size", 4096)
        num_heads = keys.integer("num_attention_heads", 32)
        if keys.get("head_dim") is None and hidden_size % max(num_heads, 1):
            raise keys.error("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
        head_dim = keys.integer("head_dim", hidden_size // max(num_heads, 1))
        generation = _Keys(generation_config or {}, f"generation_config.json beside {source}")
        end_ids = (*_token_ids(keys, "eos_token_id"), *_token_ids(generation, "eos_token_id"))
        bos_ids = _token_ids(keys, "bos_token_id")
        dtype = keys.get("dtype") or keys.get("torch_dtype")
        try:
            return cls(
                architecture=architecture,
                vocab_size=keys.integer("vocab_size", 32000),
                hidden_size=hidden_size,
                intermediate_size=keys.integer("intermediate_size", 11008),
                num_layers=keys.integer("num_hidden_layers", 32, MAX_LAYERS),
                num_heads=num_heads,
                num_kv_heads=keys.integer("num_key_value_heads", num_heads),
                head_dim=head_dim,
                max_position_embeddings=keys.integer("max_position_embeddings", 2048),
                rms_norm_eps=keys.real("rms_norm_eps", 1e-6),
                rope=_rope(keys),
                tie_word_embeddings=keys.boolean("tie_word_embeddings", False),
                attention_bias=keys.boolean("attention_bias", False),
                mlp_bias=keys.boolean("mlp_bias", False),
                eos_token_ids=tuple(dict.fromkeys(end_ids)),
                bos_token_id=bos_ids[0] if bos_ids else None,
                dtype=None if dtype is None else str(dtype),
            )
        except CheckpointError as error:
            if str(error).startswith(source):
                raise
            raise CheckpointError(f"{source}: {error}") from None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Keys:
    """A JSON object whose values are checked as they are read; null counts as absent, as in transformers."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = ""):
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"{source}: {prefix.rstrip('.') or 'the file'} must be an object, got {shown(values)}"
            )
        self.values = values
        self.source = source
        self.prefix = prefix

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def error(self, key: str, limit: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: {self.prefix}{key} must be {limit}, got {shown(self.values.get(key))}"
        )

    def integer(self, key: str, default: int, limit: int = _MAX_INT) -> int:
        value = self.get(key)
        if value is None:
            return default
        if not (_is_int(value) and 1 <= value <= limit):
            raise self.error(key, f"an integer in [1, {limit}]")
        return value

    def real(self, key: str, default: float | None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ):
            raise self.error(key, "a finite number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value


def _architecture(keys: _Keys) -> str:
    served = ", ".join(_ARCHITECTURES)
    model_type = keys.get("model_type")
    classes = keys.get("architectures")
    if classes is not None and not (
        isinstance(classes, list) and all(isinstance(c, str) for c in classes)
    ):
        raise keys.error("architectures", "a list of class names")
    if model_type is None:
        # Hand-made files sometimes name the class alone.
        known = [name for name, cls in _ARCHITECTURES.items() if classes == [cls]]
        if not known:
            raise CheckpointError(
                f"{keys.source}: no model_type (served: {served}) and architectures is {shown(classes)}"
            )
        return known[0]
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        raise keys.error("model_type", f"one of: {served}")
    if classes and classes != [_ARCHITECTURES[model_type]]:
        raise keys.error("architectures", f"[{_ARCHITECTURES[model_type]!r}]")
    return model_type


def _refuse_unserved(keys: _Keys) -> None:
    if keys.get("hidden_act") not in (None, "silu"):
        raise keys.error("hidden_act", "'silu'")
    for key in ("quantization_config", "compression_config"):
        if keys.get(key) is not None and not _quantises_kv_alone(keys.get(key)):
            raise keys.error(key, "absent (quantised safetensors are not served)")
    if keys.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise keys.error("partial_rotary_factor", "1.0")


def _quantises_kv_alone(value: Any) -> bool:
    """Whether a compressed-tensors config leaves the weights as they are: a scheme for the KV cache and
    no group of modules. The scales are tensors of their own (`weights.kv_scales`).
    """
    return (
        isinstance(value, Mapping)
        and value.get("quant_method") == "compressed-tensors"
        and isinstance(value.get("kv_cache_scheme"), Mapping)
        and value.get("config_groups") == {}
    )


def _token_ids(keys: _Keys, key: str) -> tuple[int, ...]:
    value = keys.get(key)
    ids = () if value is None else value if isinstance(value, list) else (value,)
    if not all(_is_int(i) and 0 <= i <= _MAX_INT for i in ids):
        raise keys.error(key, "a token id, a list of token ids or null")
    return tuple(ids)


def _rope(keys: _Keys) -> RopeConfig:
    """rope_parameters (transformers 5), else rope_theta + rope_scaling (4); both only where they agree."""
    theta = keys.real("rope_theta", 10000.0)
    new, old = keys.get("rope_parameters"), keys.get("rope_scaling")
    # Absent or {}: nothing is said. Anything else that is no object is refused, [] and 0 as well.
    if new is None or new == {}:
        return _rope_from({} if old is None else old, "rope_scaling.", theta, keys.source)
    rope = _rope_from(new, "rope_parameters.", theta, keys.source)
    if old is not None and old != {}:
        other = _rope_from(old, "rope_scaling.", rope.theta, keys.source)
        if other != rope:
            raise CheckpointError(
                f"{keys.source}: rope_parameters and rope_scaling must agree, "
                f"got {shown(new)} and {shown(old)}"
            )
    return rope


def _rope_from(values: Mapping[str, Any], prefix: str, theta: float, source: str) -> RopeConfig:
    keys = _Keys(values, source, prefix)
    type_key = "type" if keys.get("rope_type") is None else "rope_type"
    rope_type = "default" if keys.get(type_key) is None else keys.get(type_key)
    if keys.get("type") not in (None, rope_type):
        raise keys.error("type", f"the same as rope_type ({rope_type!r})")
    if not isinstance(rope_type, str) or rope_type not in _ROPE_TYPES:
        raise keys.error(type_key, f"one of: {', '.join(_ROPE_TYPES)}")
    for key, value in values.items():
        # An unknown key changes the frequencies in a way this project does not compute.
        if key not in _ROPE_KEYS and value is not None:
            raise keys.error(key, f"absent for rope_type {rope_type!r}")
    if keys.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise keys.error("partial_rotary_factor", "1.0")
    theta = keys.real("rope_theta", theta)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = keys.real("factor", None)
    if rope_type == "linear":
        return RopeConfig(theta=theta, rope_type="linear", factor=factor)
    if keys.get("original_max_position_embeddings") is None:
        raise keys.error("original_max_position_embeddings", "given for rope_type 'llama3'")
    return RopeConfig(
        theta=theta,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=keys.real("low_freq_factor", None),
        high_freq_factor=keys.real("high_freq_factor", None),
        original_max_position_embeddings=keys.integer("original_max_position_embeddings", 1),
    )
