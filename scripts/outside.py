"""Programs of others, each installed in a folder of its own under the user's cache: peers and clients.

Used by `scripts.peers.installs` and `scripts.clients.installs`. Nothing of such a program comes near the
project's environment. Invariant: a folder that has a stamp was installed to the end, in the version that the
stamp names.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

STAMP = "installed.txt"
PIP_QUIET = ("--quiet", "--disable-pip-version-check")


class PeerError(Exception):
    """A program of others that cannot be installed or started, and why."""


def run_quietly(command: Sequence[str | Path]) -> None:
    """Runs a step of an installation.

    Raises:
        PeerError: it failed; with the last line that it said.
    """
    print(" ".join(map(str, command)), file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        reason = said[-1] if said else f"status {done.returncode}"
        raise PeerError(f"{Path(command[0]).name} {command[1]} failed: {reason}")


def is_installed(folder: Path, version: str) -> bool:
    """Whether a program is there, whole and in this version."""
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text("utf-8") == version + "\n"


def ensure_installed(folder: Path, version: str, install: Callable[[Path], None]) -> None:
    """Installs a program if it is not there.

    Args:
        folder: its own.
        version: what its stamp says; another one installs anew.
        install: makes the folder, from nothing.

    Raises:
        PeerError: that cannot be done here.
    """
    if not is_installed(folder, version):
        print(f"installing {version} in {folder}", file=sys.stderr)
        install(folder)
        (folder / STAMP).write_text(version + "\n", "utf-8")
