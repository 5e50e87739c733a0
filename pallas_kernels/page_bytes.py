"""How many bytes one page takes in one layer, by backend layout, padding included.

Called by capacity planning, which may not import jax. Invariant (held by a test): the number here is exactly
`KVPages.zeros(...)`'s bytes divided by its number of pages.
"""

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
        Bytes a page. No layout that ships today pads, so this is 2 * page * K * D elements.

    Raises:
        ValueError: an unknown layout or dtype.
    """
    if layout not in ("head_major", "split"):
        raise ValueError(f"layout={layout!r}: no such page layout; known: head_major, split")
    if dtype not in ITEM_BYTES:
        raise ValueError(
            f"dtype={dtype!r}: no such KV element type; known: {', '.join(ITEM_BYTES)}"
        )
    return 2 * page_size * num_kv_heads * head_dim * ITEM_BYTES[dtype]
