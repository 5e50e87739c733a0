"""Debug mode: what a kernel trusts of a batch, checked on the host.

Page ids, lengths and counts are traced, and no device checks them: a page id out of range reads, or
overwrites, somebody else's memory. Called by `api` with `debug=True` and by the engine's executor
with `check_batches`. NumPy only.
"""

import numpy as np


def check_rows(
    kv_lens,
    page_table,
    kv_starts,
    cu_q_lens,
    ranges,
    *,
    num_tokens: int,
    num_pages: int,
    page_size: int,
) -> None:
    """Raise ValueError, naming the argument, the row and the limit, unless a kernel may trust these.

    Args:
        kv_lens, page_table, kv_starts, cu_q_lens, ranges: as `api.ragged_paged_attention` takes
            them, as host arrays of int32.
        num_tokens: T, tokens of the step, padding included.
        num_pages: pages in the pool. page_size: tokens a page.
    """
    num_rows = len(kv_lens)
    table = np.asarray(page_table).reshape(num_rows, -1)
    _check_table(table, num_pages)
    counts = np.diff(cu_q_lens)
    if cu_q_lens[0] != 0 or (counts < 0).any() or cu_q_lens[-1] > num_tokens:
        raise ValueError(
            f"cu_q_lens={list(map(int, cu_q_lens))}: expected to rise from 0 to at most "
            f"{num_tokens}, the tokens of the step"
        )
    _check_ranges(ranges, counts)
    lengths = np.asarray(kv_lens) - np.asarray(kv_starts)
    writer_of: dict[int, int] = {}
    for row in range(int(ranges[2])):
        start, length, limit = int(kv_starts[row]), int(lengths[row]), table.shape[1] * page_size
        if start < 0 or start % page_size:
            raise ValueError(
                f"kv_starts[{row}]={start}: expected a position that begins a page of {page_size}"
            )
        if not counts[row] <= length <= limit:
            raise ValueError(
                f"kv_lens[{row}]={int(kv_lens[row])}: from kv_starts[{row}]={start} on, expected at "
                f"least its {int(counts[row])} new tokens and at most {limit}, what its "
                f"{table.shape[1]} pages of {page_size} hold"
            )
        # The pages of its new tokens are written: the null page is nobody's.
        written = table[row, (length - counts[row]) // page_size : -(-length // page_size)]
        for page_id in written.tolist() if counts[row] else ():
            if page_id == 0:
                raise ValueError(
                    f"page_table row {row}: its new tokens go to pages {written.tolist()}, and page "
                    "0 is the null page"
                )
            other = writer_of.setdefault(page_id, row)
            if other != row:
                raise ValueError(
                    f"page_table rows {other} and {row}: both write new tokens to page {page_id}"
                )


def _check_table(table: np.ndarray, num_pages: int) -> None:
    bad = (table < 0) | (table >= num_pages)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"page_table: row {row}, entry {column} is page {int(table[row, column])}, "
            f"expected one in [0, {num_pages})"
        )


def _check_ranges(ranges, counts: np.ndarray) -> None:
    single, chunk, rows = (int(n) for n in ranges)
    if not 0 <= single <= chunk <= rows <= len(counts):
        raise ValueError(
            f"ranges={[single, chunk, rows]}: expected three counts that rise to at most "
            f"{len(counts)} rows"
        )
    if (counts[:single] != 1).any() or (counts[rows:] != 0).any():
        raise ValueError(
            f"ranges={[single, chunk, rows]}: the rows have {counts.tolist()} tokens; the first "
            f"{single} must have one each, and those from {rows} on none"
        )
    if (counts[single:rows] == 1).any():
        raise ValueError(
            f"ranges={[single, chunk, rows]}: the rows have {counts.tolist()} tokens; all rows with "
            f"one must be among the first {single}"
        )
