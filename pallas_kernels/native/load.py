"""Finds the C++ kernels and registers them with jax, once a process.

Called by the backends that are made of them, and by `dispatch` to learn whether they are there. The
object is chosen by what the CPU can do; what is missing is said in one sentence, never passed over in
silence.

Invariant: a target is registered only from an object that this CPU runs, that is whole and made from
the sources beside it, before anything is compiled against it.
"""

import ctypes
import functools
import platform
from pathlib import Path

from pallas_kernels.native.build import HERE, digest_path, digests, levels, object_path

TARGETS = (
    "jaxserve_ragged_paged_attention",
    "jaxserve_dense",
    "jaxserve_dense_gated",
    "jaxserve_dense_heads",
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
            fault = _fault_of(path)
            return (None, fault) if fault else (path, "")
    if any(object_path(level, folder).exists() for level, _, _ in levels()):
        return None, f"no build of the C++ kernels runs on this {platform.machine()} CPU"
    return None, (
        f"the C++ kernels were not built: the install found no compiler; with one, run {BUILD}"
    )


def _fault_of(path: Path) -> str | None:
    """Why an object is not to be loaded, which for a file that is cut off would end the process."""
    remedy = f"{BUILD} builds it anew"
    try:
        if digest_path(path).read_text() == digests(path):
            return None
    except (OSError, UnicodeDecodeError) as error:
        return f"{path} cannot be checked ({error}); {remedy}"
    return f"{path} is damaged, or other sources made it; {remedy}"


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    """(the library, which has to stay loaded as long as programs call it: it is kept here, or None; why)."""
    path, reason = find_object()
    if path is None:
        return None, reason
    try:
        return ctypes.cdll.LoadLibrary(str(path)), ""
    except OSError as error:  # a C++ library that it needs is missing or too old
        return None, f"{path} cannot be loaded: {error}"


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
    library, reason = _open()
    return None if library is not None else reason


@functools.cache
def register() -> ctypes.CDLL:
    """Registers the targets of the library, and returns it; does nothing the second time.

    Raises:
        NotImplementedError: there is none that this CPU runs; says why.
    """
    library, reason = _open()
    if library is None:
        raise NotImplementedError(reason)
    import jax.ffi

    for target in TARGETS:
        jax.ffi.register_ffi_target(
            target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu"
        )
    return library


def registered() -> ctypes.CDLL | None:
    """The library, once `register` has been called; looks for none."""
    return register() if register.cache_info().currsize else None
