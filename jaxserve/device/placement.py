"""`Placement`: on which devices the arrays of an engine are, and how they are cut.

Made by `build` once per engine, held by `StepShapes`; whoever compiles a program or puts an array asks it.
Three kinds, of one interface:

    no mesh              the process's default device; arrays are not bound to it
    a mesh of one        that device
    a mesh of several    params, pages and logits cut as `model.sharding` says, all else whole on each

Invariant: nothing here looks at a whole array of which this process holds a part only.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxserve.config import AxisRules, ParallelConfig
from jaxserve.errors import ConfigError, shown
from jaxserve.model.sharding import Shares, pages_spec

WHOLE = P()  # every device has all of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the arrays of an engine are.

    Args:
        mesh: the devices, axes of type Auto; None = the default device.
        rules: which axes cut what.
    """

    mesh: Mesh | None = None
    rules: AxisRules = dataclasses.field(default_factory=AxisRules)

    @classmethod
    def make(cls, parallel: ParallelConfig, mesh: Mesh | None) -> "Placement":
        """From the settings and a caller's mesh.

        Args:
            parallel: how many devices share the model, and by which axes.
            mesh: the caller's; None = the first `tensor_parallel_size` devices.

        Raises:
            ConfigError: no such axes, too few devices, or sizes that contradict each other.
        """
        rules, size = parallel.axis_rules, parallel.tensor_parallel_size
        if mesh is None:
            return cls(mesh=_first_devices(size, rules) if size > 1 else None, rules=rules)
        if not isinstance(mesh, Mesh):
            raise ConfigError(f"mesh must be a jax.sharding.Mesh, got {shown(mesh)}")
        if mesh.empty:
            raise ConfigError("mesh must have one device or more, got an empty one")
        if mesh.size > 1:
            _check_mesh(mesh, rules, size)
        elif size > 1:
            raise ConfigError(f"tensor_parallel_size={size}: the mesh has one device")
        types = (AxisType.Auto,) * len(mesh.axis_names)
        return cls(mesh=Mesh(mesh.devices, mesh.axis_names, axis_types=types), rules=rules)

    @property
    def is_shared(self) -> bool:
        """Whether there are several devices."""
        return self.mesh is not None and self.mesh.size > 1

    @property
    def kernel_mesh(self) -> Mesh | None:
        """The mesh that attention runs over; None on one device."""
        return self.mesh if self.is_shared else None

    @property
    def shares(self) -> Shares:
        """Over how many devices each logical axis is cut."""
        return Shares.of(self.mesh, self.rules) if self.mesh and self.is_shared else Shares()

    @property
    def devices(self) -> list[Any]:
        """All of them, of other processes too."""
        return [jax.devices()[0]] if self.mesh is None else list(self.mesh.devices.flat)

    @property
    def own_devices(self) -> list[Any]:
        """Those of this process."""
        return [one for one in self.devices if one.process_index == jax.process_index()]

    @property
    def platform(self) -> str:
        """Of the devices: "cpu", "gpu", "tpu"."""
        return self.devices[0].platform

    @functools.cached_property
    def is_whole_here(self) -> bool:
        """Whether all devices belong to this process."""
        return len(self.own_devices) == len(self.devices)

    def sharding(self, spec: P = WHOLE) -> Sharding | None:
        """How an array is placed; None where it goes to the default device.

        Args:
            spec: how it is cut; whole on every device if it is not said.
        """
        if self.mesh is None:
            return None
        if not self.is_shared:
            return SingleDeviceSharding(self.mesh.devices.flat[0])
        return NamedSharding(self.mesh, spec)

    def shardings(self, specs: Any) -> Any:
        """A tree of specs as a tree of shardings; None where arrays go to the default device."""
        if self.mesh is None:
            return None
        return jax.tree.map(self.sharding, specs, is_leaf=lambda leaf: isinstance(leaf, P))

    def abstract(self, tree: Any, specs: Any = WHOLE) -> Any:
        """Arrays, or abstract ones, as abstract arrays that say where they are; those that say so already
        stay as they are.

        Args:
            tree: any tree of them.
            specs: a tree of specs, or the beginning of one.
        """
        if self.mesh is None:
            return tree
        return jax.tree.map(_placed, tree, jax.tree.broadcast(self.shardings(specs), tree))

    @property
    def heads(self) -> P:
        """Of one number for each KV head [K]."""
        return P(self.rules.heads)

    @property
    def logits(self) -> P:
        """Of rows over the vocabulary [R, V]."""
        return P(None, self.rules.vocab)

    def pages(self, layout: str) -> P:
        """Of the arrays of a pool."""
        return pages_spec(layout, self.rules.heads)

    @property
    def moved_pages(self) -> P:
        """Of pages on their way, canonical: [n, layers, K, 2, page, D]."""
        return P(None, None, self.rules.heads)

    def put(self, tree: Any, spec: P = WHOLE) -> Any:
        """Arrays of the host on the devices. Other processes must put the same.

        Args:
            tree: of numpy arrays, or arrays that are on a device already.
            spec: how each of them is cut.
        """
        sharding = self.sharding(spec)
        if sharding is None or self.is_whole_here:
            return jax.device_put(tree, sharding)
        return jax.tree.map(lambda leaf: _put_own(leaf, sharding), tree)

    def put_pages(self, own: np.ndarray) -> Any:
        """What `take_pages` took, back on its way to the devices: as a program takes it."""
        if self.is_whole_here:
            return own
        sharding: Any = self.sharding(self.moved_pages)
        return jax.make_array_from_process_local_data(sharding, own)

    def take_pages(self, pages: jax.Array) -> np.ndarray:
        """Pages on their way, of the heads whose devices belong to this process, as numpy.

        Args:
            pages: [n, layers, K, 2, page, D], cut as `moved_pages`.
        """
        if pages.is_fully_addressable:
            return np.asarray(pages)
        parts = {shard.index[2].start or 0: shard.data for shard in pages.addressable_shards}
        return np.concatenate([np.asarray(parts[begin]) for begin in sorted(parts)], axis=2)

    def own_kv_heads(self, num_kv_heads: int) -> int:
        """How many of the served KV heads lie on devices of this process."""
        if self.is_whole_here:
            return num_kv_heads
        sharding: Any = self.sharding(self.heads)
        indices = sharding.addressable_devices_indices_map((num_kv_heads,)).values()
        spans = {index[0].indices(num_kv_heads)[:2] for index in indices}
        return sum(end - begin for begin, end in spans)


DEFAULT_DEVICE = Placement()


def _placed(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _put_own(leaf: Any, sharding: Any) -> jax.Array:
    """A host array on those of the devices that belong to this process; the others do their own."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])


def _first_devices(size: int, rules: AxisRules) -> Mesh:
    devices = jax.devices()
    if len(devices) < size:
        hint = (
            "; XLA_FLAGS=--xla_force_host_platform_device_count=N makes a CPU N devices, for tests"
            if devices[0].platform == "cpu"
            else ""
        )
        raise ConfigError(
            f"tensor_parallel_size={size}: there are {len(devices)} {devices[0].platform} devices"
            f"{hint}"
        )
    axes = rules.mesh_axes
    if len(axes) != 1:
        raise ConfigError(
            f"axis_rules name the mesh axes {', '.join(axes) or 'none'}: without a mesh they must "
            "name one"
        )
    return jax.make_mesh((size,), axes, axis_types=(AxisType.Auto,), devices=devices[:size])


def _check_mesh(mesh: Mesh, rules: AxisRules, tensor_parallel_size: int) -> None:
    for field in dataclasses.fields(rules):
        for axis in rules.names(field.name):
            if axis not in mesh.axis_names:
                raise ConfigError(
                    f"axis_rules.{field.name}={axis!r}: the mesh has no such axis, but "
                    f"{', '.join(map(repr, mesh.axis_names))}"
                )
    platforms = {device.platform for device in mesh.devices.flat}
    if len(platforms) > 1:
        raise ConfigError(f"mesh: devices of several platforms: {', '.join(sorted(platforms))}")
    size = math.prod(mesh.shape[axis] for axis in rules.mesh_axes)
    if tensor_parallel_size not in (1, size):
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size}: the mesh has {size} devices along "
            f"{', '.join(map(repr, rules.mesh_axes)) or 'no axis'}"
        )
