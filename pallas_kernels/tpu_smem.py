"""What the scalars of a TPU kernel may take of SMEM, the memory that its page table lies in.

Called by the kernels, by the engine's builder and by capacity planning, which may not import jax.
"""

# SMEM is 1 MiB on v5e, v5p and v6e; 1008 KiB of table compile, 1024 KiB do not.
SMEM_LIMIT_BYTES = 960 * 1024


def smem_bytes(num_rows: int, pages_per_row: int, num_kv_heads: int) -> int:
    """SMEM that a call's scalars take: the page table, what else there is a row, the scales."""
    return 4 * (num_rows * pages_per_row + 3 * num_rows + 5 + 2 * num_kv_heads)


def check_smem(num_rows: int, pages_per_row: int, num_kv_heads: int) -> None:
    """Raise ValueError unless the scalars of a call (page table, lengths, scales) fit in SMEM."""
    needed = smem_bytes(num_rows, pages_per_row, num_kv_heads)
    if needed > SMEM_LIMIT_BYTES:
        raise ValueError(
            f"page_table: {num_rows} rows of {pages_per_row} pages take {needed} bytes of SMEM with "
            f"the lengths, attention backend 'tpu' has {SMEM_LIMIT_BYTES}; take larger pages, "
            "fewer rows or a shorter context"
        )
