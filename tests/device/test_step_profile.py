"""Profiles count what a program has to read, whatever the program is."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.device.programs import Program, ProgramTable
from jaxserve.device.step_profile import record_calls
from pallas_kernels.ragged_paged_attention.layout import KVPages

V, E, T = 100, 16, 4


def make_table() -> ProgramTable:
    x, table = jnp.zeros((T, E)), {"table": jnp.zeros((V, E))}
    pages = KVPages.zeros("head_major", 3, 8, 2, 4, "float32")

    def product(params, x, pages):
        return x @ params["table"].T, pages.data[0][0]

    def look_up(params, ids):
        return params["table"][ids]

    programs = ProgramTable()
    programs.compile_all(
        [
            Program(key=("product", T), function=product, arguments=(table, x, pages)),
            Program(key=("look_up", T), function=look_up, arguments=(table, np.zeros(T, np.int32))),
        ]
    )
    return programs


def test_products_read_their_matrices_and_lookups_a_row_for_each_token():
    programs = make_table()
    table = {"table": jnp.ones((V, E))}
    pages = KVPages.zeros("head_major", 3, 8, 2, 4, "float32")
    with record_calls(programs) as calls:
        rows = programs["look_up", T](table, np.arange(T, dtype=np.int32))
        for _ in range(2):
            logits, _ = programs["product", T](table, rows, pages)
    np.testing.assert_array_equal(logits, np.full((T, V), E))
    product, look_up = calls["product", T], calls["look_up", T]
    assert (len(product.seconds), len(look_up.seconds)) == (2, 1)
    token_bytes = 2 * 2 * 4 * 4  # keys and values of 2 heads
    assert product.moved_bytes(10) == 4 * V * E + 10 * token_bytes
    assert look_up.moved_bytes(10) == 4 * T * E
    assert product.flops >= 2 * T * V * E
    assert look_up.flops < T * V * E
    assert product.median_s > 0


def test_the_table_is_itself_again_afterwards():
    programs = make_table()
    before = programs["product", T]
    with record_calls(programs):
        assert programs["product", T] is not before
    assert programs["product", T] is before
    assert isinstance(before, jax.stages.Compiled)
