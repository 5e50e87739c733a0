"""Compiles the C++ kernels: one shared object for each instruction set, beside this file.

    python -m pallas_kernels.native.build

Called by the install (hatch_build.py) where a compiler is present, and by hand in a checkout. Imports
no jax: an install compiles against the headers of the oldest jaxlib that is supported, because a
handler compiled against newer ones is refused by an older runtime. The headers need no library, so
one object serves every version of Python.

Invariant: an object is there in full or not at all, and is named after what it needs from the CPU.
Beside it lie the digests of the object and of its sources, by which `load` knows one that an install
cut short, or that older sources made.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE_ROOT = HERE.parent.parent  # C++ includes begin at pallas_kernels/
SOURCES = (
    HERE.parent / "ragged_paged_attention" / "cpu.cc",
    HERE.parent / "dense" / "cpu.cc",
    HERE / "lazy_zeros.cc",
    HERE / "cores.cc",
)
# Machine -> levels, the best first: (name, flags, what /proc/cpuinfo must list). "baseline" always runs.
X86_V3 = ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe")
X86_V4 = (*X86_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS = {
    "x86_64": (
        ("x86-64-v4", ("-march=x86-64-v4", "-mprefer-vector-width=512"), X86_V4),
        ("x86-64-v3", ("-march=x86-64-v3",), X86_V3),
    ),
    "other": (("baseline", (), ()),),
}
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-Wall", "-Wno-psabi")


class BuildError(Exception):
    """The kernels cannot be compiled here; says why."""


def levels(machine: str = "") -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
    """(name, compiler flags, CPU flags needed) of each object for a machine, the best first.

    Args:
        machine: as `platform.machine()` gives it, which is the default.
    """
    machine = (machine or platform.machine()).lower()
    return LEVELS["x86_64" if machine in ("x86_64", "amd64") else "other"]


def object_path(level: str, folder: Path = HERE) -> Path:
    """Where the object of a level lies."""
    return folder / f"kernels-{level}.so"


def digests(target: Path) -> str:
    """What must lie beside an object (`digest_path`) for it to be served, as text.

    Args:
        target: the object.

    Raises:
        OSError: it cannot be read.
    """
    sources = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(path for path in HERE.parent.rglob("*") if path.suffix in (".cc", ".h")):
        sources.update(path.read_bytes())
    made = hashlib.sha256(target.read_bytes())
    return f"object {made.hexdigest()}\nsources {sources.hexdigest()}\n"


def digest_path(target: Path) -> Path:
    """Where the digests of an object lie."""
    return target.with_suffix(".sha256")


def include_folder() -> Path:
    """The folder of XLA's FFI headers, which jaxlib carries.

    Raises:
        BuildError: no jaxlib is installed here.
    """
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("no jaxlib with XLA's FFI headers is installed")
    return Path(next(iter(spec.submodule_search_locations))) / "include"


def compiler() -> str:
    """The first C++ compiler found of COMPILERS.

    Raises:
        BuildError: there is none.
    """
    for name in COMPILERS:
        if shutil.which(name):
            return name
    raise BuildError(f"no C++ compiler: looked for {', '.join(COMPILERS)}")


def build(folder: Path = HERE) -> list[Path]:
    """Compiles every object for this machine.

    Args:
        folder: where they go.

    Raises:
        BuildError: no compiler, no headers, or the compiler fails; says what it said.
    """
    if sys.platform == "win32":
        raise BuildError("there is no build for Windows")
    command = [compiler(), *FLAGS, "-isystem", str(include_folder()), "-I", str(PACKAGE_ROOT)]
    built = []
    for level, flags, _ in levels():
        target = object_path(level, folder)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / target.name
            sources = [str(source) for source in SOURCES]
            done = subprocess.run(
                [*command, *flags, *sources, "-o", str(made)], capture_output=True, text=True
            )
            if done.returncode:
                raise BuildError(f"{command[0]} for {level} failed:\n{done.stderr[-4000:]}")
            sums = digest_path(made)
            sums.write_text(digests(made))
            os.replace(made, target)
            os.replace(sums, digest_path(target))
        built.append(target)
    return built


def main() -> int:
    """Compiles, and says what was made or why not."""
    try:
        for path in build():
            print(f"built {path.name}")
    except BuildError as error:
        print(f"the C++ kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
