"""What a lowered program depends on, as text: kept programs are found by its digest.

Called by `build`, which hands the text to a `ProgramStore`. Invariant: whatever may change what a
trace produces is in the text, so that a program made by other code, another jax, another machine or
for another model is never found. More in it than needed costs one trace; less would serve a wrong
program, so what cannot be described is refused.
"""

import dataclasses
import enum
import functools
import hashlib
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pallas_kernels
from jaxserve.device.step_shapes import StepShapes
from pallas_kernels.native.load import cpu_flags, missing

PACKAGES = (Path(__file__).parents[1], Path(str(pallas_kernels.__file__)).parent)
# Folders and files of jaxserve that no traced function reaches: what is above `device`, or beside it. All
# else counts, so what is new counts too; a test follows the imports and watches a trace.
_FOLDERS = (
    "async_engine",
    "build",
    "cli",
    "cluster",
    "groups",
    "plan",
    "server",
    "text",
    "weights",
)
_FILES = ("engine.py", "llm.py", "llm_arguments.py", "prepare.py", "step_loop.py")
NEVER_TRACED = frozenset(_FOLDERS + _FILES)


def identity(shapes: StepShapes) -> str:
    """Everything that the programs of an engine depend on, but for what each says of itself.

    Args:
        shapes: of the engine.

    Raises:
        TypeError: a field of `shapes` that has no lasting description.
    """
    device = shapes.placement.devices[0]
    parts = {
        "source": _own_source(),  # our version stands in it
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "flax": version("flax"),
        "device": [device.platform, device.device_kind, device.client.platform_version],
        "cpu": [platform.machine(), *sorted(cpu_flags())],
        "native": missing(),  # programs call what was built, and only that
        "jax.config": _jax_settings(),
        "shapes": describe(shapes),
    }
    return "\n".join(f"{name}: {value}" for name, value in parts.items())


@functools.cache
def _own_source() -> str:
    """Read once: the code of a process does not change."""
    return source_digest(PACKAGES)


def source_digest(packages: Iterable[Path]) -> str:
    """SHA-256 over the Python files of some folders that programs can be made of, by name and content."""
    digest = hashlib.sha256()
    for folder in packages:
        for path in source_files(folder):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def source_files(package: Path) -> list[Path]:
    """The Python files of a package that programs can be made of: all but NEVER_TRACED."""
    files = sorted(package.rglob("*.py"))
    return [path for path in files if path.relative_to(package).parts[0] not in NEVER_TRACED]


def _jax_settings() -> list[str]:
    """jax's settings as they are now, but for where it keeps compiled programs."""
    values = jax.config.values
    return [
        f"{name}={getattr(jax.config, name, values[name])}"
        for name in sorted(values)
        if "cache" not in name
    ]


def describe(value: Any) -> str:
    """One text for equal values, in every process.

    Raises:
        TypeError: a value whose text would not last, such as a function.
    """
    if value is None or isinstance(value, bool | int | float | str | np.dtype | enum.Enum):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__module__.partition(".")[0] == "flax":
            return type(value).__name__  # a graph: made by the source from the config beside it
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__name__}{describe(fields)}"
    if isinstance(value, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        types = [str(one) for one in value.axis_types]
        return (
            f"mesh {describe(dict(value.shape))} {types}"  # which devices they are does not matter
        )
    if isinstance(value, Mapping):
        pairs = [f"{describe(key)}: {describe(one)}" for key, one in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)}"
    raise TypeError(f"{type(value).__name__} has no lasting description: {value!r}")
