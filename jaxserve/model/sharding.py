"""Which part of a Llama each device holds when several share it, by the axes of a mesh that `AxisRules`
name.

Read by whoever places params and pages (`device.placement`), and by `attention`, which runs its kernel on
every device's own heads. Of two projections that follow each other the first is cut by columns and the
second by rows, so that a layer needs two all-reduces (after `o` and after `down`) and nothing else moves.

    q k v gate up   [in, out / n]     bias [out / n]
    o down          [in / n, out]     bias whole: it is added once, to the sum
    embedding       [V / n, E]        a token's row lies on one device; one all-reduce [T, E] a step
    lm_head         [E, V / n]        logits stay cut by vocabulary; the sampler reduces over it
    norms           whole

Embedding and head are cut by vocabulary because whole ones would be the largest arrays of a device (2
GiB each for Llama-3-70B), and because a step with few rows reads all of the head: n devices read it n
times as fast. A tied embedding serves both uses as it is.

Where there are more devices than KV heads, each head stands on several of them: the model that is served
has its KV heads repeated, and its vocabulary filled up to a multiple of the devices (`shared_config`).
Params are given in the checkpoint's shapes all the same, and `fit_param` makes them fit.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.config import AxisRules
from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from pallas_kernels.page_bytes import fills_tpu_words
from pallas_kernels.ragged_paged_attention.layout import KVPages

Axes = str | tuple[str, ...] | None
_COLUMNS = {
    **dict.fromkeys(("q", "k", "v"), "heads"),
    **dict.fromkeys(("gate", "up"), "ffn"),
    "lm_head": "vocab",
}
_ROWS = {"o": "heads", "down": "ffn"}
# Where the KV heads stand in the arrays of each page layout.
_HEAD_AXIS = {"head_major": 1, "split": 1, "tpu": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """Over how many devices each logical axis of a model is cut; 1 = every device holds it whole."""

    heads: int = 1
    ffn: int = 1
    vocab: int = 1

    @classmethod
    def even(cls, num_devices: int) -> "Shares":
        """Everything over the same devices."""
        return cls(heads=num_devices, ffn=num_devices, vocab=num_devices)

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, rules: AxisRules) -> "Shares":
        """By the sizes of the mesh's axes, which must have those that the rules name."""
        sizes = {
            field.name: math.prod(mesh.shape[axis] for axis in rules.names(field.name))
            for field in dataclasses.fields(cls)
        }
        return cls(**sizes)


def shared_config(config: ModelConfig, shares: Shares) -> ModelConfig:
    """The model that devices serve together: KV heads repeated where there are fewer than devices, the
    vocabulary filled up to a multiple of them.

    Args:
        config: of the checkpoint.
        shares: over how many devices it is cut.

    Raises:
        ConfigError: heads or the MLP's inner size cannot be cut evenly; the field, its value and the
            number of devices are named.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    _require_multiple("num_heads", heads, shares.heads)
    if kv_heads % shares.heads:
        if shares.heads % kv_heads:
            raise ConfigError(
                f"num_kv_heads={kv_heads}: {shares.heads} devices cannot share it; one must be a "
                "multiple of the other"
            )
        kv_heads = shares.heads
    _require_multiple("intermediate_size", config.intermediate_size, shares.ffn)
    vocab_size = -(-config.vocab_size // shares.vocab) * shares.vocab
    return dataclasses.replace(config, num_kv_heads=kv_heads, vocab_size=vocab_size)


def _require_multiple(name: str, value: int, num_devices: int) -> None:
    if value % num_devices:
        raise ConfigError(
            f"{name}={value}: {num_devices} devices cannot share it; it must be a multiple of them"
        )


def fit_param(array: Any, module: str, shape: Sequence[int], head_dim: int) -> Any:
    """One param in the shape that is served: KV heads repeated, rows or columns of the vocabulary filled
    up with zeros.

    Args:
        array: numpy, or on a device; in the checkpoint's shape.
        module: what the param belongs to, such as "k" or "embed".
        shape: of the param that is served.
        head_dim: D.

    Returns:
        The array itself where it fits already.
    """
    if tuple(array.shape) == tuple(shape):
        return array
    library: Any = np if isinstance(array, np.ndarray) else jnp
    if module in ("k", "v"):  # [.., K * D]: each head stands beside its copies
        by_head = array.reshape(*array.shape[:-1], -1, head_dim)
        copies = shape[-1] // array.shape[-1]
        return library.repeat(by_head, copies, axis=-2).reshape(shape)
    filler = [(0, whole - own) for whole, own in zip(shape, array.shape, strict=True)]
    return library.pad(array, filler)


def repeat_heads(values: Any, num_kv_heads: int) -> Any:
    """One value for each KV head [K] of the checkpoint -> one for each that is served; None stays None.

    Args:
        values: f32[K], numpy or on a device.
        num_kv_heads: heads that are served, a multiple of K.
    """
    if values is None or values.shape[0] == num_kv_heads:
        return values
    library: Any = np if isinstance(values, np.ndarray) else jnp
    return library.repeat(values, num_kv_heads // values.shape[0])


def param_specs(params: Any, rules: AxisRules) -> Any:
    """How each param is cut.

    Args:
        params: nested dict of arrays or abstract arrays, as `ModelFunctions.abstract_params`.
        rules: which axes of the mesh cut what.

    Returns:
        The same tree with a `PartitionSpec` for each array.

    Raises:
        ValueError: a param that no rule knows.
    """

    def spec(path, leaf) -> P:
        *_, module, name = [str(getattr(key, "key", key)) for key in path]
        if name == "scale":
            return P()
        if name == "embedding":
            return P(rules.vocab, None)
        if name == "kernel" and module in _COLUMNS:
            return P(None, getattr(rules, _COLUMNS[module]))
        if name == "kernel" and module in _ROWS:
            return P(getattr(rules, _ROWS[module]), None)
        if name == "bias" and module in _COLUMNS:
            return P(getattr(rules, _COLUMNS[module]))
        if name == "bias" and module in _ROWS:
            return P()
        raise ValueError(f"param {jax.tree_util.keystr(path)}: no rule says how to shard it")

    return jax.tree_util.tree_map_with_path(spec, params)


def pages_spec(layout: str, axes: Axes) -> P:
    """How the arrays of a layer's pool are cut: by KV head. The rows of a batch are whole everywhere.

    Args:
        layout: of the pages.
        axes: of the mesh, as `AxisRules.heads`.
    """
    return P(*[None] * _HEAD_AXIS[layout], axes)


def shardings(specs: Any, mesh: Mesh) -> Any:
    """The same tree with a `NamedSharding` for each spec."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P)
    )


def local_kv_heads(kv: KVPages, num_devices: int) -> int:
    """KV heads of a pool that each device holds.

    Args:
        kv: one layer's pages, whole.
        num_devices: how many share them.

    Raises:
        ValueError: the heads do not divide, or in layout "tpu" a device's rows do not fill words.
    """
    if kv.num_kv_heads % num_devices:
        raise ValueError(
            f"num_kv_heads={kv.num_kv_heads}: {num_devices} devices cannot share it; "
            "it must be a multiple of them"
        )
    heads = kv.num_kv_heads // num_devices
    if num_devices == 1:  # nothing is cut, so a word may be padded
        return heads
    if kv.layout == "tpu" and not fills_tpu_words(heads, kv.head_dim, kv.dtype.itemsize):
        raise ValueError(
            f"num_kv_heads={kv.num_kv_heads}: the {heads} of one of {num_devices} devices, with "
            f"head_dim {kv.head_dim} and {kv.dtype} pages, do not fill whole words of layout 'tpu'"
        )
    return heads


def on_own_heads(
    function: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    axes: Axes,
    *,
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Callable[..., Any]:
    """`function` on every device, each with its own heads of the pools among the arguments.

    Args:
        function: of positional arguments; pools (`KVPages`) may stand anywhere in them and in what it
            returns, and it sees them as pools of a device's own heads.
        mesh: the devices; its axes are of type Auto.
        axes: of the mesh, that the heads are cut by.
        in_specs, out_specs: as of `jax.shard_map`, over whole arrays.

    Raises:
        ValueError: an axis that the mesh does not have, or that is not of type Auto; when it is called,
            as `local_kv_heads`.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = (axes,) if isinstance(axes, str) else axes or ()
    for name in names:
        if types.get(name) != AxisType.Auto:
            raise ValueError(f"axis={name!r}: must be an Auto axis of the mesh, which has {types}")
    num_devices = math.prod(mesh.shape[name] for name in names)

    def own(tree: Any) -> Any:
        return _with_heads(tree, lambda kv: local_kv_heads(kv, num_devices))

    def with_own(*arguments: Any) -> Any:
        return function(*own(arguments))

    def shared(*arguments: Any) -> Any:
        own(arguments)  # what cannot be cut is refused in our own words
        # Kernels do not say how their results vary over the mesh, so that is not checked.
        results = jax.shard_map(
            with_own, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )(*arguments)
        return _with_heads(results, lambda kv: kv.num_kv_heads * num_devices)

    return shared


def _with_heads(tree: Any, count: Callable[[KVPages], int]) -> Any:
    """The tree with another number of heads written on each pool in it."""
    return jax.tree.map(
        lambda leaf: (
            dataclasses.replace(leaf, num_kv_heads=count(leaf))
            if isinstance(leaf, KVPages)
            else leaf
        ),
        tree,
        is_leaf=lambda leaf: isinstance(leaf, KVPages),
    )


def over_heads(attend: Callable[..., Any], mesh: Mesh | AbstractMesh, axes: Axes):
    """`attend` on every device's own heads.

    Attention never looks across KV heads, so nothing is exchanged.

    Args:
        attend: `ragged_paged_attention`, or what takes the same arguments.
        mesh: the devices; its axes are of type Auto: outside attention the compiler exchanges what
            the params' sharding makes it.
        axes: of the mesh, that the heads are cut by.

    Returns:
        A function of the same arguments; it raises as `local_kv_heads`.

    Raises:
        ValueError: an axis that the mesh does not have, or that is not of type Auto.
    """
    heads, scales = P(None, axes), P(axes)

    def attend_sharded(
        q,
        k_new,
        v_new,
        kv,
        kv_lens,
        page_table,
        kv_starts,
        cu_q_lens,
        ranges,
        k_scale=None,
        v_scale=None,
        sinks=None,
        **options,
    ):
        pages = pages_spec(kv.layout, axes)
        on_each = on_own_heads(
            functools.partial(attend, **options),
            mesh,
            axes,
            in_specs=(heads, heads, heads, pages, P(), P(), P(), P(), P(), *[scales] * 3),
            out_specs=(heads, pages, heads),
        )
        return on_each(
            *(q, k_new, v_new, kv),
            *(kv_lens, page_table, kv_starts, cu_q_lens, ranges),
            *(k_scale, v_scale, sinks),
        )

    return attend_sharded
