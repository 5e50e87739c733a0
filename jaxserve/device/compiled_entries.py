"""Damaged entries of jax's persistent compilation cache: found, and removed, when an engine starts.

Called by `build` before anything compiles. jax writes an entry in place and never over one that is
there, so one that was cut short (a process that was killed, a full disk) would be compiled again at
every start and never be mended. An entry is compressed as a whole, which tells whether it is all there.

Invariant: only entries written since the last look are read, so a start costs no more for an old
folder. One that another process is just writing may be removed too: it costs a compilation.
"""

import contextlib
import importlib
import logging
import os
import time
import zlib
from pathlib import Path

_LOG = logging.getLogger(__name__)
_STAMP = "jaxserve-looked-at"  # its time: entries older than that were whole
_MARGIN_NS = 60 * 10**9  # the clock of a file system may be another one
_ZLIB, _ZSTD = b"\x78", b"\x28\xb5\x2f\xfd"  # what jax compresses with; how each begins


def remove_damaged(folder: Path) -> int:
    """Removes entries that are not whole, says how many, and returns that.

    Args:
        folder: jax's `jax_compilation_cache_dir`, one that can be written.
    """
    begin_ns, stamp = time.time_ns(), folder / _STAMP
    since_ns = stamp.stat().st_mtime_ns - _MARGIN_NS if stamp.exists() else 0
    num_removed = 0
    try:
        for path in folder.glob("*-cache"):
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                if path.stat().st_mtime_ns >= since_ns and not is_whole(path.read_bytes()):
                    path.unlink()
                    num_removed += 1
        stamp.write_text("jaxserve looked at the entries of this folder then\n")
        os.utime(stamp, ns=(begin_ns, begin_ns))
    except OSError as error:
        _LOG.debug("compiled programs in %s were not all looked at: %s", folder, error.strerror)
    if num_removed:
        _LOG.warning(
            "%d compiled programs in %s were damaged: they are made anew", num_removed, folder
        )
    return num_removed


def is_whole(entry: bytes) -> bool:
    """Whether an entry can be decompressed to its end; True where nothing here can tell."""
    try:
        if entry.startswith(_ZLIB):
            zlib.decompress(entry)
            return True
        return entry.startswith(_ZSTD) and _is_whole_zstd(entry)
    except zlib.error:
        return False


def _is_whole_zstd(entry: bytes) -> bool:
    for name in ("compression.zstd", "zstandard"):  # as jax looks for them
        try:
            zstd = importlib.import_module(name)
        except ImportError:
            continue
        try:
            zstd.decompress(entry)
        except (EOFError, zstd.ZstdError):
            return False
        return True
    return True
