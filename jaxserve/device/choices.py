"""What the settings that say "auto" mean on this machine: attention backend, page size, how many layers
make a program, how many pages fit on the device and in host RAM. `dtypes.py` has the element types.

Called by `build`, once per engine. Invariant: what is found is returned; a setting that cannot be
served raises and is never replaced by another.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.device.memory import free_bytes, free_host_bytes
from jaxserve.device.page_moves import device_bytes
from jaxserve.device.placement import Placement
from jaxserve.device.programs import Lowering, lower_traced
from jaxserve.device.step_shapes import StepShapes, count_table_bytes, largest_step_bytes
from jaxserve.errors import ConfigError
from jaxserve.model.attention import AttentionKernel
from jaxserve.model.sharding import local_kv_heads, shared_config
from jaxserve.model_config import LayerKind, ModelConfig
from jaxserve.plan.capacity import (
    PoolSize,
    canonical_page_bytes,
    count_host_pages,
    pool_page_bytes,
    size_pool,
)
from pallas_kernels import dispatch
from pallas_kernels.ragged_paged_attention.layout import KVPages
from pallas_kernels.tpu_smem import check_smem

MAX_CPU_LAYERS_PER_PROGRAM = 4


def resolve_attention(
    config: EngineConfig,
    model: ModelConfig,
    placement: Placement,
    *,
    dtype: jnp.dtype,
    kv_dtype: jnp.dtype,
    max_num_seqs: int,
    max_model_len: int,
) -> tuple[AttentionKernel, int, str]:
    """(the kernel, tokens a page, why that kernel).

    Args:
        config: the settings.
        model: the model's shapes.
        placement: the devices.
        dtype: of queries.
        kv_dtype: element type of the pages.
        max_num_seqs: rows of the page table.
        max_model_len: longest context in tokens.

    Raises:
        ConfigError: no backend serves that, or not with that page size.
    """
    demand = dispatch.Demand(
        platform=placement.platform,
        compute_capability=getattr(placement.devices[0], "compute_capability", None),
        dtype=dtype.name,
        kv_dtype=kv_dtype.name,
        head_dim=model.head_dim,
        interpret=config.attention_interpret,
    )
    try:
        backend = dispatch.resolve_backend(config.attention_backend, demand)
        page_size = config.cache.page_size
        if page_size is None:
            page_size = dispatch.pick_page_size(
                backend, max_num_seqs=max_num_seqs, max_model_len=max_model_len
            )
        dispatch.check_page_size(backend, page_size)
        own_kv_heads = _own_kv_heads(model, placement, dispatch.layout_of(backend), kv_dtype)
        if backend == "tpu":
            _check_page_table(
                backend,
                page_size=page_size,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                num_kv_heads=own_kv_heads,
            )
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(str(error)) from None
    kernel = AttentionKernel(
        backend=backend,
        interpret=config.attention_interpret,
        mesh=placement.kernel_mesh,
        axis=placement.rules.heads,
    )
    return kernel, page_size, dispatch.explain_backend(config.attention_backend, demand)


def _own_kv_heads(
    model: ModelConfig, placement: Placement, layout: str, kv_dtype: jnp.dtype
) -> int:
    """KV heads of each device; raises ValueError where they cannot be shared."""
    served = shared_config(model, placement.shares)
    pages = KVPages.abstract(layout, 2, 16, served.num_kv_heads, served.head_dim, kv_dtype)
    return local_kv_heads(pages, placement.shares.heads)


def _check_page_table(
    backend: str, *, page_size: int, max_num_seqs: int, max_model_len: int, num_kv_heads: int
) -> None:
    """Raise ValueError, naming the settings, where a kernel that holds the page table has no room for it."""
    try:
        check_smem(max_num_seqs, -(-max_model_len // page_size), num_kv_heads)
    except ValueError as error:
        raise ValueError(
            f"page_size={page_size} with max_num_seqs={max_num_seqs} and "
            f"max_model_len={max_model_len}: {error}"
        ) from None


def layers_per_program(kinds: Sequence[LayerKind]) -> int:
    """All layers, except on CPU: there a few at a time run as fast and compile many times
    quicker. Where layers differ, as many as make the fewest programs.

    Args:
        kinds: of all layers, in order.
    """
    if jax.default_backend() != "cpu":
        return len(kinds)

    def num_programs(size: int) -> int:
        return len({tuple(kinds[i : i + size]) for i in range(0, len(kinds), size)})

    sizes = [n for n in range(1, MAX_CPU_LAYERS_PER_PROGRAM + 1) if len(kinds) % n == 0]
    return min(sizes, key=lambda size: (num_programs(size), -size))


def choose_pool_size(
    config: EngineConfig,
    max_model_len: int,
    shapes: StepShapes,
    lower: Lowering = lower_traced,
    *,
    num_replicas: int = 1,
) -> PoolSize:
    """How many pages to make, by the settings and by what the devices have free now. Where several
    share the model, bytes are those of all parts of a page together.

    Args:
        config: the settings.
        max_model_len: longest context in tokens.
        shapes: of the engine, with any number of pages; its largest programs may be compiled.
        lower: how those are lowered.
        num_replicas: so many pools of this size are made; where the device is the CPU in the same memory.

    Raises:
        ConfigError: the pool would hold no page, or more bytes than are free.
    """
    placement, model = shapes.placement, shapes.model.config
    num_parts = placement.shares.heads  # the devices that have a part of every page each
    on_cpu = placement.platform == "cpu"
    cache = config.cache
    by_memory = cache.num_pages is None and cache.kv_cache_gib is None
    utilization = cache.memory_utilization if by_memory else 1.0
    free = min(free_bytes(device, utilization) for device in placement.own_devices)
    if on_cpu:
        free //= num_replicas
    else:  # host RAM is not partitioned: what programs take there is not set aside
        free -= largest_step_bytes(shapes, lower) + count_table_bytes(shapes)
        free -= device_bytes(shapes) if cache.host_kv_gib else 0
        free *= num_parts
    own = dataclasses.replace(model, num_kv_heads=model.num_kv_heads // num_parts)
    return size_pool(
        cache,
        bytes_per_page=num_parts
        * pool_page_bytes(
            own,
            layout=shapes.layout,
            page_size=shapes.page_size,
            dtype=jnp.dtype(shapes.kv_dtype).name,
        ),
        page_size=shapes.page_size,
        max_model_len=max_model_len,
        max_num_seqs=shapes.buckets.max_num_seqs,
        free_bytes=free,
        on_cpu=on_cpu,
    )


def choose_host_pages(
    config: EngineConfig, shapes: StepShapes, pool: PoolSize, *, num_replicas: int = 1
) -> int:
    """How many pages to keep in host RAM; 0 where host_kv_gib is 0.

    Args:
        config: the settings.
        shapes: of the engine.
        pool: the pages on the device; where that is the CPU they are in host RAM too.
        num_replicas: each has so many.

    Raises:
        ConfigError: host_kv_gib is less than a page takes, or more than is free.
    """
    on_cpu, model = shapes.placement.platform == "cpu", shapes.model.config
    return count_host_pages(
        config.cache,
        bytes_per_page=canonical_page_bytes(
            dataclasses.replace(
                model, num_kv_heads=shapes.placement.own_kv_heads(model.num_kv_heads)
            ),
            page_size=shapes.page_size,
            dtype=jnp.dtype(shapes.kv_dtype).name,
        ),
        free_bytes=free_host_bytes() // num_replicas - (pool.num_bytes if on_cpu else 0),
    )
