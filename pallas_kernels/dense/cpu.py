"""The dense products of a layer on CPU in C++ (cpu.cc), through jax.ffi: float32, on XLA's own threads, any
number of rows, and with each what stands before and behind it: norm, bias, SwiGLU, rotation, residual.

Called by the model's packed layers, where attention runs in C++ too. A weight is packed once, when it is
put on the device, so that the kernel reads it as one run of memory. Invariant: a row of a result is the
same, bit for bit, beside any other rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import load

TARGET = "jaxserve_dense"
GATED_TARGET = "jaxserve_dense_gated"
HEADS_TARGET = "jaxserve_dense_heads"
PANEL = 64  # columns of a panel
HALF = PANEL // 2  # of which, in a gated one, belong to the gate


class Part(NamedTuple):
    """One of several parameters in an array, so that a program takes one array and not many: what it takes
    to call one grows with their number. Wherever a parameter is asked for it may be such a part; a weight
    and what goes with it then have to be parts of one array or arrays of their own alike.
    """

    array: jax.Array  # f32[size]
    at: int  # where it begins, in floats; not 0, but for a weight


class Norm(NamedTuple):
    """The root mean square norm of a product's rows: x / sqrt(mean(x^2) + eps) * scale."""

    scale: jax.Array | Part  # f32[K]
    eps: float


def packed_shape(size: int, columns: int) -> tuple[int, int, int]:
    """[P, K, 64] of a weight [K, N]."""
    return -(-columns // PANEL), size, PANEL


def gated_shape(size: int, columns: int) -> tuple[int, int, int]:
    """[P, K, 64] of a gate [K, N] and its up [K, N]."""
    return -(-columns // HALF), size, PANEL


def pack(weights: Any, out: np.ndarray | None = None) -> Any:
    """Weights side by side, as `dense` and `dense_heads` take them: column 64 p + j of what they make
    together stands in [p, :, j]; columns behind the last are zeros.

    Args:
        weights: f32[K, N] each, with an N of its own; numpy, on a device, or abstract.
        out: where the copy goes, f32[P, K, 64] of zeros; None = where numpy puts it.

    Returns:
        f32[P, K, 64] of the same kind, always a copy.
    """
    first, columns = weights[0], sum(one.shape[1] for one in weights)
    shape = packed_shape(first.shape[0], columns)
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, first.dtype)
    packed = np.zeros(shape, first.dtype) if out is None else out
    column = 0
    for weight in map(np.asarray, weights):
        begin = 0
        while begin < weight.shape[1]:  # runs of whole panels, and pieces of panels
            panel, offset = divmod(column, PANEL)
            count = min(PANEL - offset, weight.shape[1] - begin)
            if offset == 0 and weight.shape[1] - begin >= PANEL:
                whole = (weight.shape[1] - begin) // PANEL
                count = whole * PANEL
                piece = weight[:, begin : begin + count].reshape(-1, whole, PANEL)
                packed[panel : panel + whole] = piece.transpose(1, 0, 2)
            else:
                packed[panel, :, offset : offset + count] = weight[:, begin : begin + count]
            begin, column = begin + count, column + count
    return packed


def pack_gated(gate: Any, up: Any, out: np.ndarray | None = None) -> Any:
    """A gate and its up, as `dense_gated` takes them: columns 32 p + j stand in [p, :, j] and
    [p, :, 32 + j]; columns behind the last are zeros.

    Args:
        gate, up: f32[K, N]; numpy, on a device, or abstract.
        out: where the copy goes, f32[P, K, 64] of zeros; None = where numpy puts it.

    Returns:
        f32[P, K, 64] of the same kind, always a copy.
    """
    size, columns = gate.shape
    shape = gated_shape(size, columns)
    if isinstance(gate, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, gate.dtype)
    packed = np.zeros(shape, gate.dtype) if out is None else out
    whole, rest = divmod(columns, HALF)
    for begin, weight in ((0, np.asarray(gate)), (HALF, np.asarray(up))):
        pieces = weight[:, : whole * HALF].reshape(size, whole, HALF).transpose(1, 0, 2)
        packed[:whole, :, begin : begin + HALF] = pieces
        if rest:
            packed[whole, :, begin : begin + rest] = weight[:, whole * HALF :]
    return packed


def dense(
    x: jax.Array,
    packed: jax.Array | Part,
    columns: int,
    *,
    norm: Norm | None = None,
    bias: jax.Array | Part | None = None,
    residual: jax.Array | None = None,
    multiplier: float = 1.0,
) -> jax.Array:
    """residual + (norm(x) @ weight + bias) * multiplier, without what is None.

    Args:
        x: f32[M, K].
        packed: f32[P, K, 64], from `pack`.
        columns: N of the weight.
        norm: of x.
        bias: f32[N].
        residual: f32[M, N].
        multiplier: of all but the residual.

    Returns:
        f32[M, N].

    Raises:
        NotImplementedError: there is no C++ kernel for this CPU.
    """
    result = jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32)
    options = {"multiplier": np.float32(multiplier)}
    return _call(TARGET, result, x, packed, norm, bias, _or_nothing(residual), **options)


def dense_gated(
    x: jax.Array,
    packed: jax.Array | Part,
    columns: int,
    *,
    norm: Norm | None = None,
    bias: jax.Array | Part | None = None,
) -> jax.Array:
    """silu(norm(x) @ gate + bias) * (norm(x) @ up + bias), each with its half of the bias.

    Args:
        x: f32[M, K].
        packed: f32[P, K, 64], from `pack_gated`.
        columns: N of gate and up.
        norm: of x.
        bias: f32[2 N], the gate's first.

    Returns:
        f32[M, N].

    Raises:
        NotImplementedError: there is no C++ kernel for this CPU.
    """
    result = jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32)
    return _call(GATED_TARGET, result, x, packed, norm, bias)


def dense_heads(
    x: jax.Array,
    packed: jax.Array | Part,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm: Norm | None = None,
    bias: jax.Array | Part | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """norm(x) @ weight + bias as heads; each of queries and keys normed, then its first D' dimensions
    rotated: their halves are the pairs.

    Args:
        x: f32[M, K].
        packed: f32[P, K, 64], from `pack` of the projections to q, k and v.
        cos, sin: f32[M, 1, D' / 2], of every row's phase; D' is anything from 0 to D.
        num_heads, num_kv_heads: H of q, and of k and v.
        head_dim: D.
        norm: of x.
        bias: f32[N].
        q_norm, k_norm: of a head of queries and of keys, their scales f32[D].

    Returns:
        (q f32[M, H, D], k f32[M, num_kv_heads, D], v alike).

    Raises:
        NotImplementedError: there is no C++ kernel for this CPU.
    """
    sizes = (num_heads, num_kv_heads, num_kv_heads)
    shapes = [(x.shape[0], heads, head_dim) for heads in sizes]
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    (q_scale, q_options), (k_scale, k_options) = _of_norm(q_norm, "q_"), _of_norm(k_norm, "k_")
    more = (cos, sin, q_scale, k_scale)
    options = {**q_options, **k_options}
    q, k, v = _call(HEADS_TARGET, results, x, packed, norm, bias, *more, **options)
    return q, k, v


def _call(target: str, results: Any, x, packed, norm: Norm | None, bias, *more, **options) -> Any:
    load.register()
    weight, weight_at = _located(packed)
    scale, norm_options = _of_norm(norm)
    added, bias_at = _located(bias)
    options |= {**norm_options, "packed_at": weight_at, "bias_at": bias_at}
    return jax.ffi.ffi_call(target, results)(x, weight, scale, added, *more, **options)


def _of_norm(norm: Norm | None, prefix: str = "") -> tuple[jax.Array, dict[str, Any]]:
    """(scale, what the kernel is told of it and of the norm)."""
    scale, eps = (None, 0.0) if norm is None else norm
    array, at = _located(scale)
    return array, {f"{prefix}eps": np.float32(eps), f"{prefix}scale_at": at}


def _located(param: jax.Array | Part | None) -> tuple[jax.Array, np.int64]:
    """(the array of a parameter, where it begins there)."""
    array, at = param if isinstance(param, Part) else (param, 0)
    return _or_nothing(array), np.int64(at)


def _or_nothing(array: jax.Array | None) -> jax.Array:
    """What the kernel knows an argument by that is not given."""
    return jnp.zeros(0, jnp.float32) if array is None else array
