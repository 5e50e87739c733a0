"""A folder that appears whole or not at all.

    PARENT/.NAME.unfinished-PID/...   everything is written here   --rename-->   PARENT/NAME

Used by `convert`. Invariant: a process that is killed at any moment leaves at most the hidden folder,
which holds no config.json before it holds everything, so no loader takes it for a model; whoever writes
NAME next removes it, unless its writer is still alive (who holds a lock on it). What appears is on the
disk, so a machine that stops leaves it whole, too.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxserve.errors import CheckpointError

_UNFINISHED = ".unfinished-"


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Gives a hidden folder to write into, which becomes `target` once the block has ended well.

    Raises:
        CheckpointError: something is there already.
        OSError: it cannot be made or renamed.
    """
    refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}{_UNFINISHED}"
    _remove_abandoned(target.parent, prefix)
    unfinished = target.parent / f"{prefix}{os.getpid()}"
    unfinished.mkdir()
    try:
        with _locked(unfinished):
            yield unfinished
            refuse_existing(target)
            for path in unfinished.rglob("*"):
                _sync(path)
            _sync(unfinished)
            unfinished.rename(target)
            _sync(target.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # already renamed, or of no use


def refuse_existing(target: Path) -> None:
    """Raises CheckpointError unless nothing, or an empty folder, is there."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(f"{target}: is there already; remove it, or give another destination")
    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError(
            f"{target}: is there already and is not empty; remove it, or give another destination"
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a lock on a folder; the system drops it however this process ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for path in parent.iterdir():
        if not path.name.startswith(prefix):
            continue
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # gone, or none of ours
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # its writer is alive
        finally:
            os.close(handle)


def _sync(path: Path) -> None:
    """Puts a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
