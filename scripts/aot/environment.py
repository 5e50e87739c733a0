"""Environments of their own for the compilers of devices that are not there, in the user's cache folder.

Called by scripts/tpu_aot and scripts/gpu_aot in the project's environment; stdlib only. Invariant: an
environment is used only when its `.done` file names every package that it should have.
"""

import importlib.metadata
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cache_folder() -> Path:
    """Where environments are kept between calls."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxserve"


def running(*packages: str) -> list[str]:
    """Requirements for the versions of packages that run here: what is compiled is what would run."""
    return [f"{name}=={importlib.metadata.version(name)}" for name in packages]


def environment_python(
    kind: str,
    requirements: Sequence[str],
    alone: Sequence[str] = (),
    *,
    size: str,
    say: Callable[[str], None],
) -> Path:
    """The Python of an environment, made or completed if need be.

    Args:
        kind: first part of its folder's name, such as "tpu_aot".
        requirements: to install with what they require.
        alone: to install without that.
        size: how much is downloaded, for the message.
        say: told what is being made.

    Returns:
        The path of its Python.

    Raises:
        subprocess.CalledProcessError: pip could not install something; it has said why.
    """
    version = importlib.metadata.version("jax")
    folder = (
        cache_folder() / f"{kind}-{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    )
    python, done = folder / "bin" / "python", folder / ".done"
    wanted = "\n".join([*requirements, *alone])
    if done.is_file() and done.read_text(encoding="utf-8") == wanted:
        return python
    say(f"making {folder} with {', '.join([*requirements, *alone])} ({size}, once)")
    if not done.is_file():
        venv.create(folder, with_pip=True, clear=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *requirements], check=True)
    if alone:
        subprocess.run([*install, "--no-deps", *alone], check=True)
    done.write_text(wanted, encoding="utf-8")
    return python
