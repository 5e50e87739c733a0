"""One device that is not there, or several that share a model, and what its compiler makes of a program.

Used by `aot` and by the scripts that compile kernels. Invariant: bytes and shapes are those of one device.
"""

import collections
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

WHOLE = P()  # every device holds all of it
AXIS = "model"  # the mesh axis that several devices share a model over
# What lowering and compiling raise where a kernel or a program is refused; all else ends the worker.
REFUSALS = (RuntimeError, ValueError, AssertionError)
_COLLECTIVES = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("


class Target:
    """Devices to compile for.

    Args:
        devices: of a topology; one, or those that share a model.
        platform: jax's name of it: "tpu" or "cuda".
        num_cores: of a device.
    """

    def __init__(self, devices: Sequence, platform: str, num_cores: int):
        self.num_devices = len(devices)
        self.mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
        abstract = jax.sharding.AbstractDevice(
            device_kind=devices[0].device_kind, num_cores=num_cores, platform=platform
        )
        # Kernels that ask what they are compiled for read it from the context; `shard_map` takes no
        # mesh that differs from it.
        self.context = jax.sharding.AbstractMesh(
            (self.num_devices,),
            (AXIS,),
            axis_types=self.mesh.axis_types,
            abstract_device=abstract,
        )

    def array(self, shape: tuple[int, ...], dtype, spec: P = WHOLE) -> jax.ShapeDtypeStruct:
        """An abstract array on the devices."""
        if self.num_devices == 1:
            placed = jax.sharding.SingleDeviceSharding(self.mesh.devices[0])
        else:
            placed = jax.sharding.NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=placed)

    def place(self, tree: Any, specs: Any = WHOLE) -> Any:
        """Arrays or abstract arrays as abstract arrays on the devices; a spec may serve a subtree."""

        def one(spec: P, part: Any) -> Any:
            return jax.tree.map(lambda a: self.array(a.shape, a.dtype, spec), part)

        return jax.tree.map(one, specs, tree, is_leaf=lambda leaf: isinstance(leaf, P))

    def compile(
        self, function, *arguments, donate: tuple[int, ...] = (), out_shardings: Any = None
    ):
        """(compiled, seconds)."""
        begin = time.monotonic()
        pinned = {} if out_shardings is None else {"out_shardings": out_shardings}
        with jax.sharding.use_abstract_mesh(self.context):
            lowered = jax.jit(function, donate_argnums=donate, **pinned).lower(*arguments)
        return lowered.compile(), time.monotonic() - begin


def local_shape(array: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The part of a placed array that one device holds."""
    assert array.sharding is not None
    return array.sharding.shard_shape(array.shape)


def local_bytes(tree: Any) -> int:
    """Bytes that one device holds of placed arrays."""
    return sum(math.prod(local_shape(a)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def look_at(compiled, donated: Any, pools: Sequence[jax.ShapeDtypeStruct]) -> dict:
    """Bytes, and whether pools were updated in place, or read, without a copy as large as one.

    Args:
        compiled: the program.
        donated: placed arrays that it must update in place.
        pools: placed arrays, all of one size, that it must not copy.

    Returns:
        The values of a row; "fault" names what is wrong.
    """
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    faults = []
    # More of them than there are elements: the compiler pads rows to whole vectors.
    if memory.alias_size_in_bytes < local_bytes(donated):
        faults.append(
            f"{memory.alias_size_in_bytes} bytes updated in place, not {local_bytes(donated)}"
        )
    if pools:
        size = math.prod(local_shape(pools[0]))
        shapes = re.findall(r"\[([\d,]+)\]\S* copy(?:-start)?\(", text)
        copies = sum(math.prod(map(int, shape.split(","))) >= size for shape in shapes)
        if copies:
            faults.append(f"{copies} copies as large as the pool")
    hbm = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return {
        "hbm_mib": hbm / 2**20,
        "temp_mib": memory.temp_size_in_bytes / 2**20,
        "code_kib": memory.generated_code_size_in_bytes / 2**10,
        "fault": "; ".join(faults),
    }


def collectives(compiled) -> collections.Counter[str]:
    """How many exchanges between devices a program has, by kind."""
    return collections.Counter(re.findall(_COLLECTIVES, compiled.as_text()))


def refusal(error: Exception) -> str:
    """An error of the compiler as a fault: one line, not too long."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
