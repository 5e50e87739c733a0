"""Reads a Hugging Face config.json: what a checkpoint says about its model becomes a `ModelConfig`.

Called by `weights` (GGUF metadata are first put in the same words) and by whoever plans from a config
alone. Invariant: what the model code does not compute is refused here by key, value and limit, never
ignored: an ignored rope type or quantisation gives fluent nonsense instead of an error.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError, shown
from jaxserve.field_checks import is_int
from jaxserve.hf_config.families import FAMILIES, Family
from jaxserve.hf_config.keys import Keys
from jaxserve.hf_config.layers import layer_windows, rope_layers
from jaxserve.hf_config.rope import read_rope
from jaxserve.model_config import MAX_INT, MAX_LAYERS, ModelConfig


def read_hf_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, source: str
) -> ModelConfig:
    """The model of a config.json, in the spellings of transformers 4 and 5.

    A missing or null key takes the class default of transformers' configuration of that family, but for
    eos and bos: those are facts about a tokenizer, so what no file states is not assumed.

    Args:
        config: the object of config.json.
        generation_config: the object of generation_config.json, or None; only its end ids are used.
        source: name of the file, for messages.

    Raises:
        CheckpointError: names source, key, value and limit.
    """
    keys = Keys(config, source)
    architecture = _architecture(keys)
    family = FAMILIES[architecture]
    _refuse_unserved(keys)
    generation = Keys(generation_config or {}, f"generation_config.json beside {source}")
    end_ids = (*_token_ids(keys, "eos_token_id"), *_token_ids(generation, "eos_token_id"))
    bos_ids = _token_ids(keys, "bos_token_id")
    dtype = keys.get("dtype") or keys.get("torch_dtype")
    num_layers = keys.integer("num_hidden_layers", family.default("num_hidden_layers"), MAX_LAYERS)
    turned = rope_layers(keys, family, num_layers)
    try:
        return ModelConfig(
            architecture=architecture,
            num_layers=num_layers,
            **_sizes(keys, family),
            rms_norm_eps=keys.real("rms_norm_eps", family.default("rms_norm_eps")),
            rope=read_rope(keys, family),
            tie_word_embeddings=keys.boolean(
                "tie_word_embeddings", family.default("tie_word_embeddings")
            ),
            **_biases(keys, family),
            qk_norm=family.qk_norm,
            layer_windows=layer_windows(keys, family, num_layers, turned),
            rope_layers=turned,
            **_multipliers(keys, family),
            eos_token_ids=tuple(dict.fromkeys(end_ids)),
            bos_token_id=bos_ids[0] if bos_ids else None,
            dtype=None if dtype is None else str(dtype),
        )
    except CheckpointError as error:
        if str(error).startswith(source):
            raise
        raise CheckpointError(f"{source}: {error}") from None


def _architecture(keys: Keys) -> str:
    served = ", ".join(FAMILIES)
    model_type = keys.get("model_type")
    classes = keys.get("architectures")
    if classes is not None and not (
        isinstance(classes, list) and all(isinstance(c, str) for c in classes)
    ):
        raise keys.error("architectures", "a list of class names")
    if model_type is None:
        # Hand-made files sometimes name the class alone.
        known = [name for name, family in FAMILIES.items() if classes == [family.class_name]]
        if not known:
            raise CheckpointError(
                f"{keys.source}: no model_type (served: {served}) and architectures is {shown(classes)}"
            )
        return known[0]
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise keys.error("model_type", f"one of: {served}")
    class_name = FAMILIES[model_type].class_name
    if classes and classes != [class_name]:
        raise keys.error("architectures", f"[{class_name!r}]")
    return model_type


def _refuse_unserved(keys: Keys) -> None:
    if keys.get("hidden_act") not in (None, "silu"):
        raise keys.error("hidden_act", "'silu'")
    for key in ("quantization_config", "compression_config"):
        if keys.get(key) is not None and not _quantises_kv_alone(keys.get(key)):
            raise keys.error(key, "absent (quantised safetensors are not served)")


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


def _token_ids(keys: Keys, key: str) -> tuple[int, ...]:
    value = keys.get(key)
    ids = () if value is None else value if isinstance(value, list) else (value,)
    if not all(is_int(i) and 0 <= i <= MAX_INT for i in ids):
        raise keys.error(key, "a token id, a list of token ids or null")
    return tuple(ids)


def _sizes(keys: Keys, family: Family) -> dict[str, Any]:
    """Every size but the number of layers."""

    def size(key: str, derived: int = 1) -> int:
        default = family.default(key)
        return keys.integer(key, derived if default is None else default)

    hidden_size, num_heads = size("hidden_size"), size("num_attention_heads")
    derives_head_dim = keys.get("head_dim") is None and family.default("head_dim") is None
    if derives_head_dim and hidden_size % num_heads:
        raise keys.error("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
    # null says: as many as query heads. A default is for a key that is absent.
    derives_kv_heads = "num_key_value_heads" in keys.values
    num_kv_heads = (
        keys.integer("num_key_value_heads", num_heads)
        if derives_kv_heads
        else size("num_key_value_heads", num_heads)
    )
    return {
        "vocab_size": size("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": size("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": size("head_dim", hidden_size // num_heads),
        "max_position_embeddings": size("max_position_embeddings"),
    }


def _biases(keys: Keys, family: Family) -> dict[str, Any]:
    """Which projections have biases. A key that this family does not read must not ask for any."""
    said = {"qkv_bias": family.qkv_bias, "o_bias": family.o_bias, "mlp_bias": family.mlp_bias}
    for key, flag in (("attention_bias", family.qkv_bias), ("mlp_bias", family.mlp_bias)):
        if flag is False and keys.boolean(key, False):
            raise keys.error(key, "false or absent for this model_type")
    return {
        name: says if isinstance(says, bool) else keys.boolean(says, family.default(says))
        for name, says in said.items()
    }


def _multipliers(keys: Keys, family: Family) -> dict[str, Any]:
    """Granite's; another family's file must not have them."""
    names = (
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
    )
    if family.has_multipliers:
        return {name: keys.real(name, 1.0) for name in names}
    for name in names:
        if keys.get(name) not in (None, 1):
            raise keys.error(name, "1.0 or absent for this model_type")
    return {}
