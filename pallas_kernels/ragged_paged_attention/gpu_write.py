"""New keys and values into their pages, in place: the Hopper kernel of one TMA copy a token.

Called by `gpu`. XLA's scatter is compiled without a copy of the pool as well, but it writes element
by element, and to the null page for each padding token. Invariant: only slots of live tokens change.
"""

import functools

import jax
from jax import lax

from pallas_kernels import compat

MAX_TOKENS = 8  # tokens that a CTA has in flight,
SMEM_BYTES = 48 * 1024  # if they fit in this much


def write_tokens(pool, new, page_ids, offsets, num_live, *, interpret):
    """Write each live token's keys and values into its slot.

    Args:
        pool: [N, K, 2, page, D]; donate it to have it updated in place.
        new: [T, K, 2, D] of the pool's dtype.
        page_ids, offsets: i32[T], the slot of each token; of live ones no two are the same.
        num_live: i32[1], tokens that are not padding; they come first.
        interpret: as plgpu.kernel's.

    Returns:
        The pool.
    """
    num_tokens, kv_heads, _, head_dim = new.shape
    token_bytes = 2 * kv_heads * head_dim * new.dtype.itemsize
    tokens = max(1, min(MAX_TOKENS, num_tokens, SMEM_BYTES // token_bytes))
    ref = jax.new_ref(pool)

    def write_kv(*refs, **scratch):
        _write(*refs, **scratch, tokens=tokens)

    compat.gpu_kernel(
        write_kv,
        grid=(-(-num_tokens // tokens),),
        grid_names=("cta",),
        interpret=interpret,
        scratch_types={
            "buffer": compat.SMEM((tokens, kv_heads, 2, 1, head_dim), new.dtype),
            "arrived": compat.Barrier(num_barriers=tokens),
        },
    )(ref, new[:, :, :, None], page_ids, offsets, num_live)
    return jax.freeze(ref)


def _write(pool, new, page_ids, offsets, num_live, *, buffer, arrived, tokens):
    """The kernel: each CTA loads its tokens, all at once, and stores each as it arrives."""
    first = lax.axis_index("cta") * tokens
    last = num_live[0]

    def each_live(act):
        for i in range(tokens):
            compat.when(first + i < last)(functools.partial(act, i, first + i))

    def load(i, token):
        compat.copy_gmem_to_smem(new.at[token], buffer.at[i], arrived.at[i])

    def save(i, token):
        compat.barrier_wait(arrived.at[i])
        slot = pool.at[page_ids[token], :, :, compat.ds(offsets[token], 1)]
        compat.copy_smem_to_gmem(buffer.at[i], slot)

    each_live(load)
    each_live(save)
    compat.wait_smem_to_gmem(0)
