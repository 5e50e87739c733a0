"""How many KV pages to make, on the device and in host RAM.

Called by `jaxserve.build`; the answer is returned, never written into a config.
"""

from dataclasses import dataclass

from jaxserve.config import CacheConfig
from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.plan.models import ModelSpec
from pallas_kernels.page_bytes import page_bytes

GIB = 2**30
CPU_POOL_LIMIT_BYTES = 2 * GIB  # host RAM is shared with everything else: the default stays modest


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """The page pool that will be made.

    Args:
        num_pages: the null page included.
        num_bytes: of all layers.
        reason: which setting or limit decided, for the log.
    """

    num_pages: int
    num_bytes: int
    reason: str


def pool_page_bytes(
    model: ModelConfig | ModelSpec, *, layout: str, page_size: int, dtype: str
) -> int:
    """Bytes of one page over all layers, padding of the layout included.

    Args:
        model: with as many kv heads as the pool holds: of one chip's pool those of one chip.
        layout: of the attention backend's pages.
        page_size: tokens a page.
        dtype: element type of the pages by its numpy name.

    Raises:
        ValueError: as `page_bytes`.
    """
    one = page_bytes(layout, page_size, model.num_kv_heads, model.head_dim, dtype)
    return one * model.num_layers


def canonical_page_bytes(model: ModelConfig, *, page_size: int, dtype: str) -> int:
    """Bytes of one page over all layers where it leaves the device: no layout pads it."""
    return pool_page_bytes(model, layout="head_major", page_size=page_size, dtype=dtype)


def count_host_pages(cache: CacheConfig, *, bytes_per_page: int, free_bytes: int) -> int:
    """Pages that host_kv_gib gives; 0 where it is 0.

    Args:
        cache: the user's settings.
        bytes_per_page: of one canonical page over all layers.
        free_bytes: host RAM that is free.

    Raises:
        ConfigError: host_kv_gib is less than a page takes, or more than is free.
    """
    if not cache.host_kv_gib:
        return 0
    num_bytes = int(cache.host_kv_gib * GIB)
    asked = f"host_kv_gib={cache.host_kv_gib:g}"
    if num_bytes < bytes_per_page:
        raise ConfigError(f"{asked}: less than one KV page, which takes {_gib(bytes_per_page)}")
    if num_bytes > free_bytes:
        raise ConfigError(f"{asked}: only {_gib(max(free_bytes, 0))} of host RAM are free")
    return num_bytes // bytes_per_page


def size_pool(
    cache: CacheConfig,
    *,
    bytes_per_page: int,
    page_size: int,
    max_model_len: int,
    max_num_seqs: int,
    free_bytes: int,
    on_cpu: bool,
) -> PoolSize:
    """num_pages beats kv_cache_gib beats memory_utilization.

    Args:
        cache: the user's settings.
        bytes_per_page: of one page over all layers.
        page_size: tokens a page.
        max_model_len, max_num_seqs: what the pool could ever be asked to hold; more is never made
            by default.
        free_bytes: memory that memory_utilization leaves for pages once weights and programs have
            theirs.
        on_cpu: bounds the default by `CPU_POOL_LIMIT_BYTES`.

    Raises:
        ConfigError: the pool would hold no page, or more bytes than are free.
    """
    if cache.num_pages is not None:
        num_pages, reason = cache.num_pages, "num_pages"
    elif cache.kv_cache_gib is not None:
        num_pages = int(cache.kv_cache_gib * GIB) // bytes_per_page
        reason = f"kv_cache_gib={cache.kv_cache_gib:g}"
    else:
        most = 1 + max_num_seqs * -(-max_model_len // page_size)
        limits = {"max_num_seqs x max_model_len": most}
        limits["memory_utilization"] = free_bytes // bytes_per_page
        if on_cpu:
            limits["the default on CPU; kv_cache_gib gives more"] = (
                CPU_POOL_LIMIT_BYTES // bytes_per_page
            )
        reason, num_pages = min(limits.items(), key=lambda limit: limit[1])
    num_bytes = num_pages * bytes_per_page
    if num_pages < 2:
        raise ConfigError(
            f"the KV pool needs at least 2 pages ({_gib(2 * bytes_per_page)}), "
            f"{reason} allows {num_pages}"
        )
    if num_bytes > free_bytes:
        raise ConfigError(
            f"{reason}: {num_pages} KV pages take {_gib(num_bytes)}, "
            f"but {_gib(max(free_bytes, 0))} are free"
        )
    return PoolSize(num_pages=num_pages, num_bytes=num_bytes, reason=reason)


def _gib(num_bytes: int) -> str:
    num_gib = num_bytes / GIB
    return f"{num_gib:,.0f} GiB" if num_gib >= 100 else f"{num_gib:.3g} GiB"
