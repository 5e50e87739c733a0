"""Which implementation serves which platform; the one table of attention backends.

Called by the engine's builder (to choose and report a backend and a page size) and by `api`.
Imports no jax: an implementation is imported when it is first asked for. Invariant: nothing here
falls back in silence; a backend that cannot serve raises, naming the option, and `auto` says which
backends it passed over and why.
"""

import dataclasses
import importlib
from types import ModuleType

from pallas_kernels.native import load


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute ragged paged attention, and what it is able to serve.

    Args:
        name: what `--attention_backend` calls it.
        module: the module with `attend(...)`.
        layout: the physical layout of its pages, a key of `layout.LAYOUTS`.
        platform: the only one it is compiled for, or None for any.
        compute_capability: the only generation of GPU it is compiled for, or None for any.
        dtypes: of queries. kv_dtypes: of pages. head_dims: D. None where any will do.
        page_sizes: the only ones, the default first; None for powers of two from 4, 64 by default.
        custom_calls: the C++ kernels that its programs call (`native.load`); they have to be there.
    """

    name: str
    module: str
    layout: str
    platform: str | None = None
    compute_capability: str | None = None
    dtypes: tuple[str, ...] | None = None
    kv_dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    custom_calls: tuple[str, ...] = ()

    @property
    def has_interpreter(self) -> bool:
        """Whether it is a Pallas kernel, which runs anywhere in an interpreter."""
        return self.platform is not None and not self.custom_calls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
    """What a backend is asked to serve. None leaves a question out.

    Args:
        platform: jax's name of it: "cpu", "gpu" or "tpu".
        compute_capability: of a GPU, such as "9.0".
        dtype: of queries. kv_dtype: of pages. head_dim: D. layout: of pages that are there already.
        interpret: the kernel runs in Pallas' interpreter, on any platform.
    """

    platform: str | None = None
    compute_capability: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    head_dim: int | None = None
    layout: str | None = None
    interpret: bool = False


_HERE = "pallas_kernels.ragged_paged_attention"
_EIGHT_BIT = ("int8", "float8_e4m3fn", "float8_e5m2")

BACKENDS = {
    "reference": Backend(name="reference", module=f"{_HERE}.reference", layout="head_major"),
    "xla": Backend(name="xla", module=f"{_HERE}.xla", layout="split"),
    "cpu": Backend(
        name="cpu",
        module=f"{_HERE}.cpu",
        layout="head_major",
        platform="cpu",
        dtypes=("float32",),
        kv_dtypes=("float32",),
        head_dims=tuple(range(16, 257, 16)),
        custom_calls=load.TARGETS,
    ),
    "gpu": Backend(
        name="gpu",
        module=f"{_HERE}.gpu",
        layout="head_major",
        platform="gpu",
        compute_capability="9.0",
        dtypes=("bfloat16",),
        kv_dtypes=("bfloat16", *_EIGHT_BIT),
        head_dims=(64, 128, 256),
        page_sizes=(64,),
    ),
    "tpu": Backend(
        name="tpu",
        module=f"{_HERE}.tpu",
        layout="tpu",
        platform="tpu",
        dtypes=("float32", "bfloat16"),
        kv_dtypes=("float32", "bfloat16", *_EIGHT_BIT),
        head_dims=(64, 128, 256),
    ),
}

# What "auto" tries on a platform, in order.
AUTO = {"cpu": ("cpu", "xla"), "gpu": ("gpu", "xla"), "tpu": ("tpu", "xla")}

# The page table that the TPU kernel holds in SMEM, 1 MiB in all, may take this much when we choose.
TPU_TABLE_BYTES = 512 * 1024
TPU_PAGE_SIZES = (32, 64, 128, 256)

# Backend -> the module that copies the pages of its pools. Two kernels; XLA reads every pool.
_XLA_COPIES = "pallas_kernels.page_copy.xla"
PAGE_COPIES = dict.fromkeys(BACKENDS, _XLA_COPIES) | {
    "gpu": "pallas_kernels.page_copy.gpu",
    "tpu": "pallas_kernels.page_copy.tpu",
}


def resolve_backend(requested: str, demand: Demand) -> str:
    """The backend that will serve.

    Args:
        requested: "auto" or a name in BACKENDS.
        demand: what it has to serve; "auto" needs its platform.

    Returns:
        A name in BACKENDS that serves the demand: the one asked for, or the first of
        AUTO's that does.

    Raises:
        ValueError: an unknown name or platform.
        NotImplementedError: the backend, or for "auto" each of them, does not serve the demand.
    """
    if requested != "auto":
        reason = refusal(requested, demand)
        if reason is not None:
            raise NotImplementedError(reason)
        return requested
    passed_over = []
    for name in _candidates(demand):
        reason = refusal(name, demand)
        if reason is None:
            return name
        passed_over.append(reason)
    raise NotImplementedError("attention_backend='auto': " + "; ".join(passed_over))


def explain_backend(requested: str, demand: Demand) -> str:
    """One line for the log: which backend serves and why; arguments as `resolve_backend`."""
    name = resolve_backend(requested, demand)
    how = ", interpreted" if demand.interpret else ""
    if requested != "auto":
        return f"attention backend {name}{how} (as asked)"
    candidates = _candidates(demand)
    passed_over = [refusal(other, demand) for other in candidates[: candidates.index(name)]]
    because = "".join(f"; {reason}" for reason in passed_over)
    return f"attention backend {name}{how} (auto on {demand.platform}{because})"


def refusal(name: str, demand: Demand) -> str | None:
    """Why backend `name` does not serve the demand, naming the option; None where it does.

    Raises:
        ValueError: as `resolve_backend`.
    """
    backend = _backend(name)
    own = f"attention backend {name!r}"
    if demand.interpret and not backend.has_interpreter:
        return f"attention_interpret=True: {own} has no kernel to interpret, gpu and tpu have"
    on_device = demand.platform is not None and not demand.interpret
    if on_device and backend.platform not in (None, demand.platform):
        return (
            f"attention_backend={name!r} runs on {backend.platform}, and this is "
            f"{demand.platform}; --attention_backend=xla serves on every platform, and "
            "--attention_interpret runs this one in an interpreter, slowly"
        )
    questions = [
        ("dtype", demand.dtype, backend.dtypes),
        ("kv_cache_dtype", demand.kv_dtype, backend.kv_dtypes),
        ("head_dim", demand.head_dim, backend.head_dims),
    ]
    if backend.custom_calls and (missing := load.missing()):
        return f"{own}: {missing}"
    capability = backend.compute_capability
    if on_device and capability not in (None, demand.compute_capability):
        return f"compute capability={demand.compute_capability}: {own} serves {capability}"
    if name != "reference":  # it reads every layout
        questions.append(("layout", demand.layout, (backend.layout,)))
    for option, wanted, served in questions:
        if served is not None and wanted is not None and wanted not in served:
            return f"{option}={wanted}: {own} serves {', '.join(map(str, served))}"
    return None


def implementation(name: str) -> ModuleType:
    """The module that serves backend `name`, imported now; raises as `resolve_backend`."""
    return importlib.import_module(_backend(name).module)


def page_copies(requested: str, demand: Demand) -> tuple[str, ModuleType]:
    """The backend that copies pages, and its module with `copy`, `gather`, `scatter` and `LAYOUTS`.

    Args:
        requested: a name in PAGE_COPIES, which is not looked at further, or "auto".
        demand: the pool and the device; read only for "auto": the first of AUTO's that serves it.

    Raises:
        ValueError: an unknown name or platform.
    """
    name = requested
    if requested == "auto":
        name = next(
            name
            for name in _candidates(demand)
            if name == "xla" or (PAGE_COPIES[name] != _XLA_COPIES and not refusal(name, demand))
        )
    if name not in PAGE_COPIES:
        raise ValueError(
            f"backend={name!r}: no such backend; known: auto, {', '.join(PAGE_COPIES)}"
        )
    return name, importlib.import_module(PAGE_COPIES[name])


def layout_of(name: str) -> str:
    """The page layout of backend `name`, a key of `layout.LAYOUTS`; raises as `resolve_backend`."""
    return _backend(name).layout


def pick_page_size(name: str, *, max_num_seqs: int, max_model_len: int) -> int:
    """Tokens a page when the user does not say, for rows and a context that are known.

    Args:
        name: a backend.
        max_num_seqs: S, rows of the page table.
        max_model_len: longest context in tokens.

    Returns:
        For "tpu" the smallest of TPU_PAGE_SIZES whose page table of S rows takes at most
        TPU_TABLE_BYTES; for others 64.

    Raises:
        ValueError: none of them does, or as `resolve_backend`.
    """
    backend = _backend(name)
    if backend.layout != "tpu":
        return 64 if backend.page_sizes is None else backend.page_sizes[0]
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
        name: a backend.
        page_size: tokens a page.

    Raises:
        ValueError: one that it does not serve, or an unknown backend.
    """
    served = _backend(name).page_sizes
    if served is not None and page_size not in served:
        sizes = ", ".join(map(str, served))
        raise ValueError(f"page_size={page_size}: attention backend {name!r} serves {sizes} only")
    if page_size < 4 or page_size & (page_size - 1):
        raise ValueError(
            f"page_size={page_size}: attention backend {name!r} serves powers of two from 4 up"
        )
    return page_size


def _candidates(demand: Demand) -> tuple[str, ...]:
    if demand.platform not in AUTO:
        raise ValueError(
            f"platform={demand.platform!r}: no attention backend; known: {', '.join(AUTO)}"
        )
    return AUTO[demand.platform]


def _backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise ValueError(
            f"attention_backend={name!r}: no such backend; known: {', '.join(BACKENDS)}"
        )
    return BACKENDS[name]
