"""How many pages fit: which setting wins, and what is refused."""

import pytest

from jaxserve.config import CacheConfig
from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.plan.capacity import CPU_POOL_LIMIT_BYTES, GIB, pool_page_bytes, size_pool

MIB = 2**20


def size(
    cache: CacheConfig, *, free=100 * GIB, on_cpu=False, bytes_per_page=MIB, seqs=4, length=640
):
    return size_pool(
        cache,
        bytes_per_page=bytes_per_page,
        page_size=64,
        max_model_len=length,
        max_num_seqs=seqs,
        free_bytes=free,
        on_cpu=on_cpu,
    )


def test_num_pages_beats_kv_cache_gib_beats_memory_utilization():
    everything = CacheConfig(num_pages=7, kv_cache_gib=1.0)
    assert size(everything).num_pages == 7
    assert size(CacheConfig(kv_cache_gib=1.0)).num_pages == 1024
    assert size(CacheConfig()).num_pages == 1 + 4 * 10


def test_memory_bounds_the_default():
    found = size(CacheConfig(), free=20 * MIB)
    assert (found.num_pages, found.num_bytes, found.reason) == (20, 20 * MIB, "memory_utilization")


def test_on_cpu_the_default_stays_modest_but_an_explicit_size_does_not():
    many = {"seqs": 4096, "length": 8192, "on_cpu": True}
    assert size(CacheConfig(), **many).num_bytes == CPU_POOL_LIMIT_BYTES
    assert size(CacheConfig(kv_cache_gib=8.0), **many).num_pages == 8192


@pytest.mark.parametrize(
    ("cache", "free", "message"),
    [
        (
            CacheConfig(num_pages=200),
            100 * MIB,
            r"num_pages: 200 KV pages take 0.195 GiB, but 0.0977 GiB",
        ),
        (CacheConfig(kv_cache_gib=1.0), 100 * MIB, "kv_cache_gib=1: 1024 KV pages"),
        (CacheConfig(kv_cache_gib=0.001), GIB, "kv_cache_gib=0.001 allows 1"),
        (CacheConfig(), MIB, "memory_utilization allows 1"),
        (CacheConfig(), -5, "memory_utilization allows -1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(cache, free, message):
    with pytest.raises(ConfigError, match=message):
        size(cache, free=free)


def test_page_bytes_cover_every_layer():
    model = ModelConfig(
        vocab_size=100,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
    )
    assert pool_page_bytes(model, layout="split", page_size=64, dtype="float32") == (
        30 * 2 * 64 * 3 * 64 * 4
    )
    for dtype in ("int8", "float8_e4m3fn"):
        assert pool_page_bytes(model, layout="split", page_size=64, dtype=dtype) == (
            30 * 2 * 64 * 3 * 64
        )
