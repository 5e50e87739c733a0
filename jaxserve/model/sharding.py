"""Which part of a Llama each device holds when several share it, over one axis of a mesh.

Read by whoever places params and pages, and by `attention`, which runs its kernel on every device's
own heads. Of two projections that follow each other the first is cut by columns and the second by
rows, so that a layer needs two all-reduces (after `o` and after `down`) and nothing else moves.

    q k v gate up   [in, out / n]     bias [out / n]
    o down          [in / n, out]     bias whole: it is added once, to the sum
    embedding       [V / n, E]        a token's row lies on one device; one all-reduce [T, E] a step
    lm_head         [E, V / n]        logits stay cut by vocabulary; the sampler reduces over it
    norms           whole

Embedding and head are cut by vocabulary because whole ones would be the largest arrays of a device (2
GiB each for Llama-3-70B), and because a step with few rows reads all of the head: n devices read it n
times as fast. A tied embedding serves both uses as it is.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.model_config import ModelConfig
from pallas_kernels.page_bytes import tpu_words
from pallas_kernels.ragged_paged_attention.layout import KVPages

_COLUMNS = ("q", "k", "v", "gate", "up", "lm_head")
_ROWS = ("o", "down")
# Where the KV heads stand in the arrays of each page layout.
_HEAD_AXIS = {"head_major": 1, "split": 1, "tpu": 2}


def param_specs(params: Any, axis: str) -> Any:
    """How each param is cut.

    Args:
        params: nested dict of arrays or abstract arrays, as `ModelFunctions.abstract_params`.
        axis: name of the mesh axis.

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
            return P(axis, None)
        if name == "kernel" and module in _COLUMNS:
            return P(None, axis)
        if name == "kernel" and module in _ROWS:
            return P(axis, None)
        if name == "bias" and module in (*_COLUMNS, *_ROWS):
            return P(axis) if module in _COLUMNS else P()
        raise ValueError(f"param {jax.tree_util.keystr(path)}: no rule says how to shard it")

    return jax.tree_util.tree_map_with_path(spec, params)


def pages_spec(layout: str, axis: str) -> P:
    """How the arrays of a layer's pool are cut: by KV head. The rows of a batch are whole everywhere.

    Args:
        layout: of the pages.
        axis: name of the mesh axis.
    """
    return P(*[None] * _HEAD_AXIS[layout], axis)


def shardings(specs: Any, mesh: Mesh) -> Any:
    """The same tree with a `NamedSharding` for each spec."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P)
    )


def check_model(config: ModelConfig, num_devices: int) -> None:
    """Raise ValueError unless every array that is cut divides by the number of devices."""
    for name in ("num_kv_heads", "intermediate_size", "vocab_size"):
        value = getattr(config, name)
        if value % num_devices:
            raise ValueError(
                f"{name}={value}: {num_devices} devices cannot share it; it must be a multiple of them"
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
    if kv.layout == "tpu":
        whole, _ = tpu_words(kv.num_kv_heads, kv.head_dim, kv.dtype.itemsize)
        words, pack = tpu_words(heads, kv.head_dim, kv.dtype.itemsize)
        # A word may hold rows of two heads: then n times a device's words, padded, is more than all.
        if words * pack * 128 != 2 * heads * kv.head_dim or words * num_devices != whole:
            raise ValueError(
                f"num_kv_heads={kv.num_kv_heads}: the {heads} of one of {num_devices} devices, with "
                f"head_dim {kv.head_dim} and {kv.dtype} pages, do not fill whole words of layout 'tpu'"
            )
    return heads


def over_heads(attend: Callable[..., Any], mesh: Mesh | AbstractMesh, axis: str):
    """`attend` on every device's own heads.

    Attention never looks across KV heads, so nothing is exchanged.

    Args:
        attend: `ragged_paged_attention`, or what takes the same arguments.
        mesh: the devices; its axes are of type Auto: outside attention the compiler exchanges what
            the params' sharding makes it.
        axis: the mesh axis that the heads are cut by.

    Returns:
        A function of the same arguments; it raises as `local_kv_heads`.

    Raises:
        ValueError: an axis that the mesh does not have, or that is not of type Auto.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if types.get(axis) != AxisType.Auto:
        raise ValueError(f"axis={axis!r}: must be an Auto axis of the mesh, which has {types}")
    num_devices = mesh.shape[axis]
    heads, scales = P(None, axis), P(axis)

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
        own = local_kv_heads(kv, num_devices)

        def on_one_device(q, k_new, v_new, kv, *rest):
            kv = dataclasses.replace(kv, num_kv_heads=own)
            return attend(q, k_new, v_new, kv, *rest, **options)

        pages = pages_spec(kv.layout, axis)
        # Kernels do not say how their results vary over the mesh, so that is not checked.
        out, written, lse = jax.shard_map(
            on_one_device,
            mesh=mesh,
            in_specs=(heads, heads, heads, pages, P(), P(), P(), P(), P(), *[scales] * 3),
            out_specs=(heads, pages, heads),
            check_vma=False,
        )(
            *(q, k_new, v_new, kv),
            *(kv_lens, page_table, kv_starts, cu_q_lens, ranges),
            *(k_scale, v_scale, sinks),
        )
        return out, dataclasses.replace(written, num_kv_heads=kv.num_kv_heads), lse

    return attend_sharded
