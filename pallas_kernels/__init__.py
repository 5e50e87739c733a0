"""Attention kernels over paged KV: jax and numpy only; they know no request and no engine.

`dispatch` and `page_bytes` import no jax, so capacity planning and flag checks can use them anywhere.
"""
