"""How many pages fit: which setting wins, and what is refused."""

import pytest

from jaxserve.config import CacheConfig
from jaxserve.errors import ConfigError
from jaxserve.model_config import ModelConfig
from jaxserve.plan.capacity import (
    CPU_POOL_LIMIT_BYTES,
    GIB,
    canonical_page_bytes,
    count_host_pages,
    pool_page_bytes,
    size_pool,
)

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
        (CacheConfig(num_pages=10**8), 100 * MIB, "take 97,656 GiB, but 0.0977 GiB are free"),
        (CacheConfig(kv_cache_gib=1.0), 100 * MIB, "kv_cache_gib=1: 1024 KV pages"),
        (CacheConfig(kv_cache_gib=0.001), GIB, "kv_cache_gib=0.001 allows 1"),
        (CacheConfig(), MIB, "memory_utilization allows 1"),
        (CacheConfig(), -5, "memory_utilization allows -1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(cache, free, message):
    with pytest.raises(ConfigError, match=message):
        size(cache, free=free)


def test_host_kv_gib_gives_whole_pages():
    def count(gib, **options):
        options = {"bytes_per_page": 3 * MIB, "free_bytes": 2 * GIB} | options
        return count_host_pages(CacheConfig(host_kv_gib=gib), **options)

    assert count(0.0, free_bytes=-1) == 0
    assert count(1.0) == 341
    assert count(2.0) == 682
    assert count(3 / 1024) == 1
    with pytest.raises(ConfigError, match=r"host_kv_gib=2\.1: only 2 GiB of host RAM are free"):
        count(2.1)
    with pytest.raises(ConfigError, match="host_kv_gib=1: only 0 GiB of host RAM are free"):
        count(1.0, free_bytes=-5)
    with pytest.raises(
        ConfigError, match=r"host_kv_gib=0\.0029: less than one KV page, .* 0\.00293"
    ):
        count(0.0029)


MODEL = ModelConfig(
    vocab_size=100,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
)


def test_pages_in_host_ram_are_not_padded():
    """Layout tpu fills the last word of 3 heads in bfloat16 to 4; what leaves the device has none of it."""
    wide = pool_page_bytes(MODEL, layout="tpu", page_size=64, dtype="bfloat16")
    assert wide == 30 * 2 * 64 * 4 * 64 * 2
    found = canonical_page_bytes(MODEL, page_size=64, dtype="bfloat16")
    assert found == 30 * 2 * 64 * 3 * 64 * 2


def test_page_bytes_cover_every_layer():
    assert pool_page_bytes(MODEL, layout="split", page_size=64, dtype="float32") == (
        30 * 2 * 64 * 3 * 64 * 4
    )
    for dtype in ("int8", "float8_e4m3fn"):
        assert pool_page_bytes(MODEL, layout="split", page_size=64, dtype=dtype) == (
            30 * 2 * 64 * 3 * 64
        )
