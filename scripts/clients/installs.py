"""Outside clients: which versions, how each is installed, how its checks are run.

Used by `scripts/run_clients`. Invariant: that of `scripts.outside`.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.clients.checks import Server
from scripts.outside import PIP_QUIET, PeerError, ensure_installed, is_installed, run_quietly

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "jaxserve" / "clients"


def _install_python(folder: Path, requirement: str) -> None:
    run_quietly([sys.executable, "-m", "venv", "--clear", folder])
    run_quietly([folder / "bin" / "python", "-m", "pip", "install", *PIP_QUIET, requirement])


def _install_node(folder: Path, requirement: str) -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise PeerError("node and npm are needed")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"private": true}\n', "utf-8")
    quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
    run_quietly([npm, "install", f"--prefix={folder}", *quiet, requirement])


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client.

    Args:
        name: what --clients calls it, and its folder.
        requirement: what is installed; changing it installs anew.
        checks: the script with its checks: a module for Python, a file for Node.
        is_node: whether it is a package of npm.
        is_quick: whether CI runs it.
    """

    name: str
    requirement: str
    checks: str
    is_node: bool = False
    is_quick: bool = False

    @property
    def folder(self) -> Path:
        """Where it is installed."""
        return CACHE / self.name

    @property
    def is_installed(self) -> bool:
        """Whether it is there, whole and in this version."""
        return is_installed(self.folder, self.requirement)

    def ensure_installed(self) -> None:
        """Installs it if it is not there.

        Raises:
            PeerError: that cannot be done here.
        """
        install: Callable[[Path, str], None] = _install_node if self.is_node else _install_python
        ensure_installed(
            self.folder, self.requirement, lambda folder: install(folder, self.requirement)
        )

    def command(self, server: Server) -> Sequence[str]:
        """How its checks are run, in ROOT."""
        node = shutil.which("node") or "node"
        python = str(self.folder / "bin" / "python")
        if self.checks.endswith(".mjs"):
            return [node, str(ROOT / "scripts" / "clients" / self.checks), *server]
        interpreter = sys.executable if self.is_node else python
        return [interpreter, "-m", f"scripts.clients.{self.checks}", *server]


CLIENTS = {
    client.name: client
    for client in (
        Client(name="openai", requirement="openai==3.51.0", checks="openai_python", is_quick=True),
        Client(
            name="openai_node",
            requirement="openai@7.55.0",
            checks="openai_node.mjs",
            is_node=True,
            is_quick=True,
        ),
        Client(name="langchain", requirement="langchain-openai==1.7.4", checks="langchain"),
        Client(name="llm", requirement="llm==0.36", checks="llm_cli"),
        Client(name="lm_eval", requirement="lm-eval[api]==0.4.13", checks="lm_eval_tasks"),
        Client(
            name="schemathesis",
            requirement="schemathesis==4.32.5",
            checks="schemathesis_runs",
            is_quick=True,
        ),
        Client(
            name="prism",
            requirement="@stoplight/prism-cli@5.16.0",
            checks="prism_proxy",
            is_node=True,
        ),
    )
}
