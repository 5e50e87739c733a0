"""How many bytes one page takes in one layer, by backend layout, padding included.

Called by capacity planning, which may not import jax. Invariant (held by a test): the number here is exactly
`KVPages.zeros(...)`'s bytes divided by its number of pages.
"""

TPU_LANES = 128

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


def page_bytes(layout: str, page_size: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of one page (keys and values) in one layer.

    Args:
        layout: a layout name, see `dispatch.layout_of(backend)`.
        page_size: tokens a page.
        num_kv_heads: KV heads held here (per shard, if sharded).
        head_dim: elements a head.
        dtype: element type name of the pool, such as "float32".

    Returns:
        Bytes a page: 2 * page * K * D elements, and in layout tpu what fills the last word.

    Raises:
        ValueError: an unknown layout or dtype, or a head_dim that layout tpu does not hold.
    """
    if layout not in ("head_major", "split", "tpu"):
        raise ValueError(f"layout={layout!r}: no such page layout; known: head_major, split, tpu")
    if dtype not in ITEM_BYTES:
        raise ValueError(
            f"dtype={dtype!r}: no such KV element type; known: {', '.join(ITEM_BYTES)}"
        )
    if layout == "tpu":
        words, pack = tpu_words(num_kv_heads, head_dim, ITEM_BYTES[dtype])
        return page_size * words * pack * TPU_LANES * ITEM_BYTES[dtype]
    return 2 * page_size * num_kv_heads * head_dim * ITEM_BYTES[dtype]


def tpu_words(num_kv_heads: int, head_dim: int, item_bytes: int) -> tuple[int, int]:
    """How layout tpu holds one token: rows of 128 lanes, `pack` of them to a row of 32-bit words.

    Args:
        num_kv_heads: K.
        head_dim: D: 64 puts a head's key and value side by side on one row; 128 takes a row for
            each, 256 two rows for each.
        item_bytes: bytes of an element, 1, 2 or 4.

    Returns:
        (rows of words, pack).

    Raises:
        ValueError: another head_dim.
    """
    pack = 4 // item_bytes
    return -(-_tpu_rows(num_kv_heads, head_dim) // pack), pack


def fills_tpu_words(num_kv_heads: int, head_dim: int, item_bytes: int) -> bool:
    """Whether layout tpu holds a token without padding. Only then can several devices hold such heads
    each of one pool: a word may not hold rows of two devices.

    Args:
        num_kv_heads, head_dim, item_bytes: as in `tpu_words`, of one device.

    Raises:
        ValueError: a head_dim that the layout does not hold.
    """
    return _tpu_rows(num_kv_heads, head_dim) % (4 // item_bytes) == 0


def _tpu_rows(num_kv_heads: int, head_dim: int) -> int:
    """Rows of 128 lanes that a token takes."""
    rows = {64: num_kv_heads, 128: 2 * num_kv_heads, 256: 4 * num_kv_heads}
    if head_dim not in rows:
        raise ValueError(f"head_dim={head_dim}: page layout 'tpu' holds 64, 128 and 256")
    return rows[head_dim]
