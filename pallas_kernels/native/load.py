"""Finds the C++ kernels and registers them with jax, once a process.

Called by the backends that are made of them, and by `dispatch` to learn whether they are there. The
object is chosen by what the CPU can do; what is missing is said in one sentence, never passed over in
silence.

Invariant: a target is registered only from an object that this CPU runs, before anything is compiled
against it.
"""

import ctypes
import functools
import platform
from pathlib import Path

from pallas_kernels.native.build import HERE, levels, object_path

TARGETS = (
    "jaxserve_ragged_paged_attention",
    "jaxserve_dense",
    "jaxserve_tied_head",
    "jaxserve_lazy_zeros",
)
BUILD = "python -m pallas_kernels.native.build"


@functools.cache
def find_object(folder: Path = HERE) -> tuple[Path | None, str]:
    """(the best object that this CPU runs, or None; why there is none).

    Args:
        folder: where objects lie.
    """
    able = cpu_flags()
    for level, _, needs in levels():
        path = object_path(level, folder)
        if set(needs) <= able and path.exists():
            return path, ""
    if any(object_path(level, folder).exists() for level, _, _ in levels()):
        return None, f"no build of the C++ kernels runs on this {platform.machine()} CPU"
    return None, (
        f"the C++ kernels were not built: the install found no compiler; with one, run {BUILD}"
    )


def cpu_flags() -> frozenset[str]:
    """What the CPU can do, in the words of /proc/cpuinfo; empty where there is no such file."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return frozenset()
    for line in info.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def missing() -> str | None:
    """Why the C++ kernels cannot be used here; None where they can."""
    path, reason = find_object()
    return None if path is not None else reason


@functools.cache
def register() -> ctypes.CDLL:
    """Loads the object and registers its targets; does nothing the second time.

    Returns:
        The library, which has to stay loaded as long as programs call it: it is kept here.

    Raises:
        NotImplementedError: there is no object for this CPU, or it was built from older sources and
            lacks a target; nothing is registered then.
        OSError: it cannot be loaded.
    """
    path, reason = find_object()
    if path is None:
        raise NotImplementedError(reason)
    import jax.ffi

    library = ctypes.cdll.LoadLibrary(str(path))
    for target in TARGETS:
        if not hasattr(library, target):
            raise NotImplementedError(
                f"{path} has no {target}: it was built from older sources; build it again with "
                f"{BUILD}"
            )
    for target in TARGETS:
        jax.ffi.register_ffi_target(
            target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu"
        )
    return library
