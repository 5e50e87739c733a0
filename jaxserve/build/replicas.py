"""Where each replica of an engine is: the devices cut into equal parts, and weights on their way from the
first part to the others. Called by `from_loaded`.

Invariant: no device belongs to two replicas.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxserve.config import ParallelConfig
from jaxserve.device.placement import WHOLE, Placement
from jaxserve.errors import ConfigError, shown


def place_replicas(parallel: ParallelConfig, mesh: Mesh | None) -> list[Placement]:
    """The devices of each of `data_parallel_size` replicas.

    Args:
        parallel: how many replicas, and how many devices each.
        mesh: the caller's. With several replicas it has one axis, beside those of the axis rules, that has as
            many devices as there are replicas. None = the first devices there are.

    Raises:
        ConfigError: too few devices, or a mesh that cannot be cut so.
    """
    num_replicas = parallel.data_parallel_size
    if num_replicas == 1:
        return [Placement.make(parallel, mesh)]
    one = dataclasses.replace(parallel, data_parallel_size=1)
    parts = _first_parts(parallel) if mesh is None else _cut(mesh, parallel)
    return [Placement.make(one, part) for part in parts]


def copy_to(tree: Any, placement: Placement) -> Any:
    """Arrays of another replica on the devices of this one, cut the same way.

    Args:
        tree: of jax arrays.
        placement: of the same kind and size as where they are.
    """

    def copied(leaf: jax.Array) -> jax.Array:
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else WHOLE
        return jax.device_put(leaf, placement.sharding(spec))

    return jax.block_until_ready(jax.tree.map(copied, tree))


def _first_parts(parallel: ParallelConfig) -> list[Mesh]:
    num_replicas, size = parallel.data_parallel_size, parallel.tensor_parallel_size
    devices, axes = jax.devices(), parallel.axis_rules.mesh_axes
    if len(devices) < num_replicas * size:
        hint = (
            "; XLA_FLAGS=--xla_force_host_platform_device_count=N makes a CPU N devices, for tests"
            if devices[0].platform == "cpu"
            else ""
        )
        raise ConfigError(
            f"data_parallel_size={num_replicas} with tensor_parallel_size={size} needs "
            f"{num_replicas * size} devices: there are {len(devices)} {devices[0].platform} devices{hint}"
        )
    if size > 1 and len(axes) != 1:
        raise ConfigError(
            f"axis_rules name the mesh axes {', '.join(axes) or 'none'}: without a mesh they must name one"
        )
    names = axes[:1] or ("model",)
    parts = np.array(devices[: num_replicas * size]).reshape(num_replicas, size)
    return [Mesh(part, names, axis_types=(AxisType.Auto,)) for part in parts]


def _cut(mesh: Mesh, parallel: ParallelConfig) -> list[Mesh]:
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh must be a jax.sharding.Mesh, got {shown(mesh)}")
    num_replicas = parallel.data_parallel_size
    names = [
        name
        for name in mesh.axis_names
        if name not in parallel.axis_rules.mesh_axes and mesh.shape[name] == num_replicas
    ]
    if len(names) != 1:
        sizes = ", ".join(f"{name!r} of {size}" for name, size in mesh.shape.items())
        raise ConfigError(
            f"data_parallel_size={num_replicas}: the mesh must have one axis of that size that no axis "
            f"rule names, it has {sizes or 'no axis'}"
        )
    where = mesh.axis_names.index(names[0])
    rest = tuple(name for name in mesh.axis_names if name != names[0])
    parts = np.moveaxis(mesh.devices, where, 0)
    if not rest:
        rest, parts = ("model",), parts[:, None]
    return [Mesh(part, rest, axis_types=(AxisType.Auto,) * len(rest)) for part in parts]
