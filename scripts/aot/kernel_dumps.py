"""What ptxas made of each Mosaic GPU kernel: registers, spills, shared memory, target.

Read from the files that Mosaic writes beside a compilation when it is asked to. jax 0.12 compiles a
kernel once in a process, however many programs hold it, and then writes no assembly; so what was found
is kept by the kernel's hash. Invariant: a program's kernels are all known, or `KernelDumps.read` raises.
"""

import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TARGET = "sm_90a"
# Of a kernel of which two blocks must fit on a multiprocessor.
MAX_REGISTERS = 64
MAX_SMEM_BYTES = 113 * 1024
_ASKED = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")
_CALL = re.compile(r'custom_call_target="mosaic_gpu[^\n]*?op_name="([^"]*)"[^\n]*')
_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel as compiled.

    Args:
        registers: of a thread.
        spill_bytes: stored and loaded, because registers did not suffice.
        smem_bytes: shared memory of a block.
        target: what the assembly is for, such as "sm_90a".
    """

    registers: int
    spill_bytes: int
    smem_bytes: int
    target: str


class KernelDumps:
    """Kernels of the programs that this process compiles."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Kernel] = {}

    @contextmanager
    def asked(self) -> Iterator[Path]:
        """Lets Mosaic write what it makes into a new folder, which is removed in the end."""
        with tempfile.TemporaryDirectory(prefix="kernel-dumps-") as folder:
            os.environ.update(dict.fromkeys(_ASKED, "1"), MOSAIC_GPU_DUMP_TO=folder)
            yield Path(folder)
            del os.environ["MOSAIC_GPU_DUMP_TO"]

    def read(self, folder: Path, text: str) -> dict[str, Kernel]:
        """The kernels of a program.

        Args:
            folder: of `asked`, in which the program was compiled.
            text: of the compiled program.

        Returns:
            By the name of the kernel's function. Of several kernels with one name the worst of each
            figure.

        Raises:
            ValueError: a kernel of which nothing was written, now or before.
        """
        written = _read_folder(folder)
        found: dict[str, Kernel] = {}
        for call in _CALL.finditer(text):
            name, digest = _kernel_name(call[1]), _HASH.search(call[0])
            key = (name, digest[1] if digest else "")
            if key not in self._known and name not in written:
                raise ValueError(f"kernel {name}: nothing was written of it, only {list(written)}")
            if key not in self._known:
                self._known[key] = written[name]
            found[name] = _worst(found.get(name), self._known[key])
        return found


def _kernel_name(op_name: str) -> str:
    """The function in "jit(f)/name/mpmd_map"."""
    return op_name.rsplit("/", 2)[-2]


def _read_folder(folder: Path) -> dict[str, Kernel]:
    """The worst of each figure by kernel name; files are NAME_0.ptxas and so on."""
    found: dict[str, Kernel] = {}
    for path in sorted(folder.glob("*.ptxas")):
        name = path.stem.rpartition("_")[0]
        said = path.read_text(encoding="utf-8")
        assembly = path.with_suffix(".ptx").read_text(encoding="utf-8")
        smem = [
            int(size)
            for file in folder.glob(f"{name}_*.resources.txt")
            for size in re.findall(r"smem_scratch_bytes=(\d+)", file.read_text(encoding="utf-8"))
        ]
        kernel = Kernel(
            registers=max(map(int, re.findall(r"Used (\d+) registers", said))),
            spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", said))),
            smem_bytes=max(smem),
            target=" ".join(sorted(set(re.findall(r"\.target (\w+)", assembly)))),
        )
        found[name] = _worst(found.get(name), kernel)
    return found


def _worst(one: Kernel | None, other: Kernel) -> Kernel:
    if one is None:
        return other
    return Kernel(
        registers=max(one.registers, other.registers),
        spill_bytes=max(one.spill_bytes, other.spill_bytes),
        smem_bytes=max(one.smem_bytes, other.smem_bytes),
        target=" ".join(sorted({*one.target.split(), *other.target.split()})),
    )


def faults(kernels: dict[str, Kernel], *, resident: tuple[str, ...] = ()) -> list[str]:
    """What is wrong with compiled kernels.

    Args:
        kernels: by name.
        resident: names of those of which two blocks must fit on a multiprocessor: decoding waits for
            memory, and a second block has loads under way meanwhile.
    """
    found = []
    for name, kernel in kernels.items():
        if kernel.spill_bytes:
            found.append(f"{name}: {kernel.spill_bytes} bytes of spills")
        if kernel.target != TARGET:
            found.append(f"{name}: assembly for {kernel.target}, not {TARGET}")
        if name in resident and kernel.registers > MAX_REGISTERS:
            found.append(f"{name}: {kernel.registers} registers, more than {MAX_REGISTERS}")
        if name in resident and kernel.smem_bytes > MAX_SMEM_BYTES:
            found.append(
                f"{name}: {kernel.smem_bytes} bytes of shared memory, more than {MAX_SMEM_BYTES}"
            )
    return found
