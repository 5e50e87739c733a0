"""`ProgramStore`: lowered programs kept on disk by jax.export, so that a second start traces nothing.

Made by `build` where there is a `compilation_cache_dir`, beside jax's own entries, which hold what is
compiled; a `ProgramTable` lowers through it. One program is one file, named after the program and the
digest of all that it depends on (`program_identity`, and its own arguments):

    | magic | SHA-256 of the rest | JSON: digest, structure of what is returned | jax.export's bytes |

Invariant: a program is served only from a file that is whole and was made for exactly this digest;
whatever else is there is passed over with a warning and made anew. Files appear complete or not at
all. A first start compiles what it will find in a second one, so both are the same program.

Kept programs are StableHLO, for whoever may write to the folder to change: keep it to yourself.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flatbuffers  # noqa: F401 - jax.export needs it to write, and does not bring it along
import jax
import jax.export

from jaxserve.device.output_tree import known_structures, read_tree, write_tree
from jaxserve.device.programs import Program, jitted

_LOG = logging.getLogger(__name__)
_MAGIC = b"jaxserve program 1\n"
_DIGEST_BYTES = 32
MAX_KEPT = 4096  # files; an engine has some fifty, of ten to a hundred KB each
_SCRATCH = "scratch-"  # folders of files that are being written
_SCRATCH_S = 3600  # older ones were left by a process that was killed
_NAME = re.compile(r"[a-z_]+-\d+-[0-9a-f]{32}\.program")


def _cut(leaf: Any) -> str | None:
    """How an abstract argument is placed; None where it does not say."""
    return _place(leaf.sharding) if isinstance(leaf, jax.ShapeDtypeStruct) else None


def _place(sharding: Any) -> str | None:
    """A sharding as text; which devices they are does not matter, only how many."""
    if sharding is None or isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return None
    return str(sharding)


class ProgramStore:
    """Lowers programs, from disk where it can.

    Args:
        folder: where they are kept; made if need be.
        identity: what all of them depend on.
        custom_calls: targets that programs may call. They are ours, so that their arguments change
            with our source, which is part of the identity; jax.export has to be told.
        can_write: whether new ones are kept; else they are only looked for.
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        custom_calls: Sequence[str] = (),
        *,
        can_write: bool = True,
    ):
        self._folder = folder
        self._identity = identity
        self._checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in custom_calls]
        self._can_write = can_write
        self.num_traced = 0  # programs that were not found

    def __call__(self, program: Program) -> jax.stages.Lowered:
        """Lowers a program; traces it, and keeps it, where it was not found."""
        digest = self._digest(program)
        path = self._path(program, digest)
        known = known_structures(program.arguments, program.returns)
        found = self._read(path, digest)
        if found is None:
            outputs, exported = self._trace(program, known)
            self._write(path, digest, outputs, exported)
            self.num_traced += 1
        else:
            outputs, exported = found

        def call(*arguments: Any) -> Any:
            arrays: Any = exported.call(*jax.tree.leaves(arguments))
            return read_tree(outputs, known, arrays)

        call.__name__ = program.key[0]  # what a profile shows
        return jitted(program, call).lower(*program.arguments)

    def count(self, programs: Sequence[Program]) -> int:
        """How many of them have a file here, damaged or not."""
        return sum(self._path(one, self._digest(one)).exists() for one in programs)

    def _path(self, program: Program, digest: str) -> Path:
        return self._folder / f"{program.key[0]}-{program.key[1]}-{digest[:32]}.program"

    def _digest(self, program: Program) -> str:
        leaves, structure = jax.tree.flatten(program.arguments)
        parts = [
            self._identity,
            repr(program.key),
            str(structure),
            repr([(leaf.shape, str(leaf.dtype), _cut(leaf)) for leaf in leaves]),
            repr(program.donated),
            repr([_place(one) for one in jax.tree.leaves(program.out_shardings)]),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _trace(self, program: Program, known: Any) -> tuple[Any, jax.export.Exported]:
        """(the structure of what it returns, the program over flat arrays)."""
        leaves, structure = jax.tree.flatten(program.arguments)
        outputs: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            returned = program.function(*jax.tree.unflatten(structure, arrays))
            results, returned_structure = jax.tree.flatten(returned)
            numbered = jax.tree.unflatten(returned_structure, range(len(results)))
            outputs.append(write_tree(numbered, known))
            return results

        exported = jax.export.export(jax.jit(flat), disabled_checks=self._checks)(*leaves)
        return outputs[0], exported

    def _read(self, path: Path, digest: str) -> tuple[Any, jax.export.Exported] | None:
        """None where there is no file, or none to be trusted."""
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            _LOG.warning("kept program %s cannot be read: %s", path, error.strerror)
            return None
        magic, rest = content[: len(_MAGIC)], content[len(_MAGIC) :]
        checksum, body = rest[:_DIGEST_BYTES], rest[_DIGEST_BYTES:]
        if magic != _MAGIC or hashlib.sha256(body).digest() != checksum:
            _LOG.warning("kept program %s is damaged: it is made anew", path)
            return None
        line, _, exported = body.partition(b"\n")
        header = json.loads(line)
        if header["digest"] != digest:
            _LOG.warning("kept program %s is another one: it is made anew", path)
            return None
        self._touch(path)
        return header["outputs"], jax.export.deserialize(bytearray(exported))

    def _write(self, path: Path, digest: str, outputs: Any, exported: jax.export.Exported) -> None:
        if not self._can_write:
            return
        header = json.dumps({"digest": digest, "outputs": outputs}).encode()
        body = header + b"\n" + bytes(exported.serialize())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=self._folder) as scratch:
                made = Path(scratch) / path.name
                made.write_bytes(_MAGIC + hashlib.sha256(body).digest() + body)
                os.replace(made, path)
        except OSError as error:
            self._can_write = False  # said once, not for each program
            _LOG.warning("programs cannot be kept in %s: %s", self._folder, error.strerror)

    def _touch(self, path: Path) -> None:
        """Marks an entry as used, for `prune`; a folder that may only be read is left as it is."""
        try:
            os.utime(path)
        except OSError:
            _LOG.debug("kept program %s cannot be marked as used", path)

    def prune(self, limit: int = MAX_KEPT) -> None:
        """Removes the entries unused for longest beyond `limit`: those of older versions, in time.

        What a process that was killed left half-written goes too. Only what is named as here is
        touched. Other processes may do the same.
        """
        try:
            for path in self._folder.glob(f"{_SCRATCH}*"):
                if time.time() - path.stat().st_mtime > _SCRATCH_S:
                    shutil.rmtree(path, ignore_errors=True)
            entries = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
            entries.sort(key=lambda path: path.stat().st_mtime)
            for path in entries[: max(0, len(entries) - limit)]:
                path.unlink(missing_ok=True)
        except OSError as error:
            _LOG.debug("kept programs in %s were not pruned: %s", self._folder, error.strerror)
