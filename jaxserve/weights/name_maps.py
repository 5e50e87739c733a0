"""Which tensor of a checkpoint becomes which parameter: the tables of `weights`, as data.

Read by `loader.py` (Hugging Face names -> the params tree of `model/`) and `gguf.py` (GGUF names ->
Hugging Face names).

Invariant: one row per parameter. A checkpoint loads only if its tensors and these rows match one to
one, but for what is named here as known: scales of the KV cache, and tensors that nothing needs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.model_config import ModelConfig

# Buffers that old exporters stored beside the weights; the model computes them itself.
_ROTARY = r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
# Scales of 8-bit queries and probabilities: attention here leaves both as wide as they are.
_ATTENTION_SCALES = (
    r"model\.layers\.\d+\.self_attn\."
    r"((attn\.)?(q|prob|prob_output)_scale|q_proj\.(q|output)_scale)"
)
_IGNORED = re.compile(f"{_ROTARY}|{_ATTENTION_SCALES}")

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
    return _PARAM_SPECS[config.architecture](config)


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


def _llama(config: ModelConfig) -> list[ParamSpec]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    specs = [
        ParamSpec(name=EMBEDDING, path=("embed", "embedding"), shape=(config.vocab_size, hidden))
    ]
    for layer in range(config.num_layers):
        hf, path = f"model.layers.{layer}", ("layers", layer)
        for hf_norm, norm in (
            ("input_layernorm", "input_norm"),
            ("post_attention_layernorm", "post_attn_norm"),
        ):
            specs.append(
                ParamSpec(
                    name=f"{hf}.{hf_norm}.weight", path=(*path, norm, "scale"), shape=(hidden,)
                )
            )
        for part, shape in (
            ("q", (q_dim, hidden)),
            ("k", (kv_dim, hidden)),
            ("v", (kv_dim, hidden)),
            ("o", (hidden, q_dim)),
        ):
            name = f"{hf}.self_attn.{part}_proj"
            bias = config.o_bias if part == "o" else config.qkv_bias
            specs += _linear(name, (*path, "attn", part), shape, bias)
        if config.qk_norm:
            specs += [
                ParamSpec(
                    name=f"{hf}.self_attn.{norm}.weight",
                    path=(*path, "attn", norm, "scale"),
                    shape=(config.head_dim,),
                )
                for norm in ("q_norm", "k_norm")
            ]
        for part, shape in (
            ("gate", (ffn, hidden)),
            ("up", (ffn, hidden)),
            ("down", (hidden, ffn)),
        ):
            specs += _linear(f"{hf}.mlp.{part}_proj", (*path, "mlp", part), shape, config.mlp_bias)
    specs.append(ParamSpec(name="model.norm.weight", path=("norm", "scale"), shape=(hidden,)))
    if not config.tie_word_embeddings:
        specs += _linear("lm_head", ("lm_head",), (config.vocab_size, hidden), bias=False)
    return specs


# Families whose tensors are called as Llama's, but for those that a flag of the config adds.
_CALLED_AS_LLAMA = (
    "llama",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "smollm3",
    "granite",
    "seed_oss",
)
_PARAM_SPECS: dict[str, Callable[[ModelConfig], list[ParamSpec]]] = dict.fromkeys(
    _CALLED_AS_LLAMA, _llama
)

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
}
_GGUF_NAME = re.compile(r"(?:blk\.(0|[1-9]\d*)\.)?(\w+)\.(weight|bias)")


def hf_name_of_gguf(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor ("blk.0.attn_q.weight"), or None where there is none."""
    match = _GGUF_NAME.fullmatch(name)
    if match is None:
        return None
    block, module, kind = match.groups()
    if block is None:
        return f"{_GGUF_TOP[module]}.{kind}" if module in _GGUF_TOP else None
    if module not in _GGUF_BLOCK:
        return None
    return f"model.layers.{block}.{_GGUF_BLOCK[module]}.{kind}"
