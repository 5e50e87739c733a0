"""Which tensor of a checkpoint becomes which parameter: the tables of `weights`, as data.

Read by `loader.py` (Hugging Face names -> the params tree of `model/`) and `gguf.py` (GGUF names ->
Hugging Face names).

Invariant: one row per parameter, and every row of a stored tensor belongs to one parameter. A
checkpoint loads only if its tensors and these rows cover each other, but for what is named here as
known: scales of the KV cache, and tensors that nothing needs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.model_config import ModelConfig

# Buffers that old exporters stored beside the weights; the model computes them itself.
_ROTARY = r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
# Scales of 8-bit queries and probabilities: attention here leaves both as wide as they are.
_ATTENTION_SCALES = (
    r"model\.layers\.\d+\.self_attn\."
    r"((attn\.)?(q|prob|prob_output)_scale|q_proj\.(q|output)_scale)"
)
_GGUF_ROTARY = r"blk\.\d+\.attn_rot_embd\.weight"
_IGNORED = re.compile(f"{_ROTARY}|{_GGUF_ROTARY}|{_ATTENTION_SCALES}")

# Scales of an 8-bit KV cache, by what they are the scales of. Source: the names that the exporters
# and loaders in the field agree on: compressed-tensors and llm-compressor (self_attn.k_scale, before
# them k_proj.output_scale), ModelOpt (k_proj.k_scale), Quark (k_proj.output_scale), AutoFP8
# (kv_scale, later k_scale), dumps of vLLM's own modules (attn.k_scale); see "Separate kv_scale into
# k_scale and v_scale", https://github.com/vllm-project/vllm/pull/6081, and
# https://github.com/vllm-project/vllm/pull/11787.
_KV_SCALES = {
    "self_attn.k_scale": "k",
    "self_attn.v_scale": "v",
    "self_attn.attn.k_scale": "k",
    "self_attn.attn.v_scale": "v",
    "self_attn.k_proj.k_scale": "k",
    "self_attn.v_proj.v_scale": "v",
    "self_attn.k_proj.output_scale": "k",
    "self_attn.v_proj.output_scale": "v",
    "self_attn.kv_scale": "kv",
    "self_attn.attn.kv_scale": "kv",
}
_IN_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d*)\.(.+)")

# Families whose q, k and v are stored as one projection, and gate and up as another.
_FUSED = frozenset({"phi3"})

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
EMBEDDING_PATH = ("embed", "embedding")
HEAD_PATH = ("lm_head", "kernel")


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter.

    Args:
        name: the tensor's name in a Hugging Face checkpoint.
        path: keys into the params tree; layer keys are ints.
        shape: as stored, that is [out, in] for a projection.
        transpose: whether the tree holds it transposed ([in, out]).
        first_row: where it begins in the stored tensor, for one of several that are stored as one.
        stored_rows: rows of that stored tensor; None = those of this parameter alone.
    """

    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    transpose: bool = False
    first_row: int = 0
    stored_rows: int | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor, in which this parameter may be a run of rows."""
        return self.shape if self.stored_rows is None else (self.stored_rows, *self.shape[1:])

    @property
    def tree_shape(self) -> tuple[int, ...]:
        """The shape in the params tree."""
        return self.shape[::-1] if self.transpose else self.shape

    def as_param(self) -> "ParamSpec":
        """The same parameter in a file that holds the params tree itself."""
        return ParamSpec(name=param_name(self.path), path=self.path, shape=self.tree_shape)


def param_name(path: tuple[str | int, ...]) -> str:
    """A path in the params tree as a name: "layers/0/attn/q/kernel"."""
    return "/".join(str(key) for key in path)


def param_specs(config: ModelConfig) -> list[ParamSpec]:
    """Every parameter of the model, in file order; lm_head only where the config's head is untied."""
    hidden = config.hidden_size
    specs = [ParamSpec(name=EMBEDDING, path=EMBEDDING_PATH, shape=(config.vocab_size, hidden))]
    for layer in range(config.num_layers):
        specs += _layer(config, f"model.layers.{layer}", ("layers", layer))
    specs.append(_norm("model.norm", ("norm",), hidden))
    if not config.tie_word_embeddings:
        specs += _linear("lm_head", ("lm_head",), (config.vocab_size, hidden), bias=False)
    return specs


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint of that config: shape by Hugging Face name, in file order."""
    return {spec.name: spec.stored_shape for spec in param_specs(config)}


def is_ignored(name: str) -> bool:
    """Whether a stored tensor is known to carry nothing that the model needs."""
    return _IGNORED.fullmatch(name) is not None


def kv_scale_parts(name: str) -> tuple[int, str] | None:
    """(layer, "k", "v" or "kv" for both) if a tensor of that name is a scale of the KV cache."""
    match = _IN_LAYER.fullmatch(name)
    if match is None or match[2] not in _KV_SCALES:
        return None
    return int(match[1]), _KV_SCALES[match[2]]


def _linear(
    name: str, path: tuple[str | int, ...], shape: tuple[int, int], bias: bool
) -> list[ParamSpec]:
    specs = [ParamSpec(name=f"{name}.weight", path=(*path, "kernel"), shape=shape, transpose=True)]
    if bias:
        specs.append(ParamSpec(name=f"{name}.bias", path=(*path, "bias"), shape=shape[:1]))
    return specs


def _fused(
    name: str, path: tuple[str | int, ...], parts: Mapping[str, int], width: int
) -> list[ParamSpec]:
    """Projections without biases that are stored as one, in the order of `parts` (rows of each)."""
    specs, first_row, total = [], 0, sum(parts.values())
    for part, num_rows in parts.items():
        specs.append(
            ParamSpec(
                name=f"{name}.weight",
                path=(*path, part, "kernel"),
                shape=(num_rows, width),
                transpose=True,
                first_row=first_row,
                stored_rows=total,
            )
        )
        first_row += num_rows
    return specs


def _norm(name: str, path: tuple[str | int, ...], width: int) -> ParamSpec:
    return ParamSpec(name=f"{name}.weight", path=(*path, "scale"), shape=(width,))


def _layer(config: ModelConfig, hf: str, path: tuple[str | int, ...]) -> list[ParamSpec]:
    """The parameters of one layer: names under `hf`, keys under `path`."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv, gate_up = {"q": q_dim, "k": kv_dim, "v": kv_dim}, {"gate": ffn, "up": ffn}
    attn, mlp = (*path, "attn"), (*path, "mlp")
    specs = [
        _norm(f"{hf}.input_layernorm", (*path, "input_norm"), hidden),
        _norm(f"{hf}.post_attention_layernorm", (*path, "post_attn_norm"), hidden),
    ]
    fused = config.architecture in _FUSED
    if fused:
        specs += _fused(f"{hf}.self_attn.qkv_proj", attn, qkv, hidden)
    else:
        for part, rows in qkv.items():
            name = f"{hf}.self_attn.{part}_proj"
            specs += _linear(name, (*attn, part), (rows, hidden), config.qkv_bias)
    specs += _linear(f"{hf}.self_attn.o_proj", (*attn, "o"), (hidden, q_dim), config.o_bias)
    if config.qk_norm:
        for part in ("q_norm", "k_norm"):
            specs.append(_norm(f"{hf}.self_attn.{part}", (*attn, part), config.head_dim))
    if fused:
        specs += _fused(f"{hf}.mlp.gate_up_proj", mlp, gate_up, hidden)
    else:
        for part, rows in gate_up.items():
            name = f"{hf}.mlp.{part}_proj"
            specs += _linear(name, (*mlp, part), (rows, hidden), config.mlp_bias)
    specs += _linear(f"{hf}.mlp.down_proj", (*mlp, "down"), (hidden, ffn), config.mlp_bias)
    return specs


# GGUF module names -> Hugging Face module names; ".weight" and ".bias" are the same in both.
_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
# What a family has otherwise: Phi-3 is written as it is stored, with its fused projections.
_GGUF_BLOCK_OF = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
}
_GGUF_NAME = re.compile(r"(?:blk\.(0|[1-9]\d*)\.)?(\w+)\.(weight|bias)")


def hf_name_of_gguf(name: str, model_type: str) -> str | None:
    """The Hugging Face name of a GGUF tensor ("blk.0.attn_q.weight"), or None where there is none.

    Args:
        name: as the file has it.
        model_type: of the Hugging Face config.
    """
    match = _GGUF_NAME.fullmatch(name)
    if match is None:
        return None
    block, module, kind = match.groups()
    if block is None:
        return f"{_GGUF_TOP[module]}.{kind}" if module in _GGUF_TOP else None
    inner = gguf_block_names(model_type).get(module)
    return None if inner is None else f"model.layers.{block}.{inner}.{kind}"


def gguf_block_names(model_type: str) -> dict[str, str]:
    """GGUF name -> Hugging Face name of each module of a layer."""
    return _GGUF_BLOCK | _GGUF_BLOCK_OF.get(model_type, {})
