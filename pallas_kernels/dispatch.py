"""Which implementation serves which platform; the one table of attention backends.

Called by the engine's builder (to choose and report a backend and a page size) and by `api`.
Imports no jax: an implementation is imported when it is first asked for. Invariant: nothing here
falls back in silence; a backend that cannot serve raises, naming the option.
"""

import dataclasses
import importlib
from types import ModuleType


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute ragged paged attention.

    Args:
        name: what `--attention_backend` calls it.
        module: the module with `attend(...)`; None when this version does not ship it.
        layout: the physical layout of its pages, a key of `layout.LAYOUTS`.
        default_page_size: tokens a page when the user leaves the choice to us.
        platform: the only one it is compiled for, or None for any.
    """

    name: str
    module: str | None
    layout: str
    default_page_size: int = 64
    platform: str | None = None


_HERE = "pallas_kernels.ragged_paged_attention"

BACKENDS = {
    "reference": Backend(name="reference", module=f"{_HERE}.reference", layout="head_major"),
    "xla": Backend(name="xla", module=f"{_HERE}.xla", layout="split"),
    "cpu": Backend(name="cpu", module=None, layout="head_major"),
    "gpu": Backend(name="gpu", module=f"{_HERE}.gpu", layout="head_major", platform="gpu"),
    "tpu": Backend(name="tpu", module=f"{_HERE}.tpu", layout="tpu", platform="tpu"),
}

# The page table that the TPU kernel holds in SMEM, 1 MiB in all, may take this much when we choose.
TPU_TABLE_BYTES = 512 * 1024
TPU_PAGE_SIZES = (32, 64, 128, 256)

AUTO = {"cpu": "xla", "gpu": "xla", "cuda": "xla", "rocm": "xla", "tpu": "tpu"}


def resolve_backend(requested: str, platform: str) -> str:
    """The backend that will serve.

    Args:
        requested: "auto" or a name in BACKENDS.
        platform: jax's name of the platform: "cpu", "gpu" or "tpu".

    Returns:
        A name in BACKENDS whose implementation ships. "auto" is "tpu" on TPU and "xla" elsewhere:
        this version ships no kernel for GPU, and `explain_backend` says so in words.

    Raises:
        ValueError: an unknown name or platform, or a backend that this version does not ship.
    """
    if requested == "auto":
        if platform not in AUTO:
            raise ValueError(
                f"platform={platform!r}: no attention backend; known: {', '.join(AUTO)}"
            )
        return AUTO[platform]
    return _backend(requested).name


def check_platform(name: str, platform: str) -> None:
    """Refuses a backend whose kernels are compiled for another platform than the one at hand.

    Args:
        name: a backend that ships.
        platform: jax's name of the platform.

    Raises:
        ValueError: it cannot run here; naming both.
    """
    own = _backend(name).platform
    if own is not None and own != platform:
        raise ValueError(
            f"attention_backend={name!r} runs on {own}, and this is {platform}; "
            "--attention_backend=xla serves on every platform"
        )


def explain_backend(requested: str, platform: str) -> str:
    """One line for the log: which backend serves and why; arguments as `resolve_backend`."""
    name = resolve_backend(requested, platform)
    if requested != "auto":
        return f"attention backend {name} (as asked)"
    if platform in ("cpu", "tpu"):
        return f"attention backend {name} (auto on {platform})"
    return f"attention backend {name} (auto on {platform}: this version ships no {platform} kernel)"


def implementation(name: str) -> ModuleType:
    """The module that serves backend `name`, imported now; raises as `resolve_backend`."""
    module = _backend(name).module
    assert module is not None  # _backend refuses what does not ship
    return importlib.import_module(module)


def layout_of(name: str) -> str:
    """The page layout of backend `name`, a key of `layout.LAYOUTS`; raises as `resolve_backend`."""
    return _backend(name).layout


def default_page_size(name: str) -> int:
    """Tokens a page when neither the user nor `pick_page_size` says; raises as `resolve_backend`."""
    return _backend(name).default_page_size


def pick_page_size(name: str, *, max_num_seqs: int, max_model_len: int) -> int:
    """Tokens a page when the user does not say, for rows and a context that are known.

    Args:
        name: a backend that ships.
        max_num_seqs: S, rows of the page table.
        max_model_len: longest context in tokens.

    Returns:
        For "tpu" the smallest of TPU_PAGE_SIZES whose page table of S rows takes at most
        TPU_TABLE_BYTES; for others `default_page_size`.

    Raises:
        ValueError: none of them does, or as `resolve_backend`.
    """
    if _backend(name).layout != "tpu":
        return default_page_size(name)
    for page_size in TPU_PAGE_SIZES:
        if 4 * max_num_seqs * -(-max_model_len // page_size) <= TPU_TABLE_BYTES:
            return page_size
    raise ValueError(
        f"max_num_seqs={max_num_seqs} and max_model_len={max_model_len}: attention backend "
        f"{name!r} holds 4 bytes for each page of each sequence, {TPU_TABLE_BYTES} in all, and pages "
        f"of {TPU_PAGE_SIZES[-1]} tokens are the largest it takes by itself; lower one of them"
    )


def check_page_size(name: str, page_size: int) -> int:
    """Return `page_size` if backend `name` serves it.

    Args:
        name: a backend that ships.
        page_size: tokens a page.

    Raises:
        ValueError: not a power of two of at least 4, or an unknown backend.
    """
    _backend(name)
    if page_size < 4 or page_size & (page_size - 1):
        raise ValueError(
            f"page_size={page_size}: attention backend {name!r} serves powers of two from 4 up"
        )
    return page_size


def _backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise ValueError(
            f"attention_backend={name!r}: no such backend; known: auto, {', '.join(BACKENDS)}"
        )
    backend = BACKENDS[name]
    if backend.module is None:
        raise ValueError(
            f"attention_backend={name!r}: this version does not ship that kernel; "
            "--attention_backend=xla serves on every platform"
        )
    return backend
