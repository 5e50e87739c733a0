"""The device layer: everything is compiled before the first request, and the pages are updated in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.compile_counter import CompileCounter
from jaxserve.device.programs import Program, ProgramTable
from jaxserve.request import SamplingParams
from jaxserve.schedule.buckets import Bucket
from tests.llms import WHOLE_LADDERS, greedy, shared_llm


def test_nothing_compiles_after_warm_up():
    llm = shared_llm(**WHOLE_LADDERS)
    llm.generate([[1, 2, 3]], greedy(2))
    counter = CompileCounter()
    mixes = [
        greedy(3),
        SamplingParams(max_tokens=3, temperature=0.7, seed=1),
        SamplingParams(max_tokens=3, top_k=5, top_p=0.9, min_p=0.1),
        SamplingParams(max_tokens=2, stop_token_ids=[3], logprobs=True),
    ]
    for length in (1, 2, 3, 5, 31, 32, 33, 70, 120):
        llm.generate([[7] * length] * (1 + length % 6), mixes[length % 4])
    llm.generate([[5] * n for n in range(1, 20)], mixes[2])
    assert counter.count == 0
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7.0))  # the control: a compilation is seen
    assert counter.count >= 1


def test_pages_are_updated_in_place():
    llm = shared_llm()
    executor = llm.engine.executor

    def pointers():
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(executor._kv_pages)]

    before = pointers()
    llm.generate([[1, 2, 3], [4] * 50], greedy(5))
    assert pointers() == before


def test_padding_writes_to_the_null_page_only():
    llm = shared_llm()
    llm.generate([[9] * 70], greedy(3))
    executor = llm.engine.executor

    def pages():
        ids = jnp.arange(1, llm.engine.scheduler.kv.pool.num_pages, dtype=jnp.int32)
        return [np.asarray(kv.gather(ids)) for kv in executor._kv_pages]

    before = pages()
    assert any(page.any() for page in before)
    executor.submit(executor._shapes.padding(Bucket(32, 4))).result()
    for old, new in zip(before, pages(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_an_unknown_bucket_or_shape_raises_instead_of_compiling():
    table = ProgramTable()
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    table.compile_all([Program(key=("double", 4), function=lambda x: x + x, arguments=(x,))])
    assert table["double", 4](np.ones(4, np.float32)).tolist() == [2.0] * 4
    with pytest.raises(KeyError, match="double"):
        table["double", 8]
    for wrong in (np.ones(5, np.float32), np.ones(4, np.int32)):
        with pytest.raises(TypeError):
            table["double", 4](wrong)


def test_check_batches_refuses_a_page_id_out_of_range():
    llm = shared_llm(check_batches=True)
    plain = shared_llm()
    (checked,), (unchecked,) = (one.generate([[1, 2, 3]], greedy(2)) for one in (llm, plain))
    assert checked.outputs == unchecked.outputs
    executor = llm.engine.executor
    padding = executor._shapes.padding(Bucket(32, 4))
    table = padding.page_table.copy()
    table[0] = executor._shapes.num_pages
    bad = dataclasses.replace(padding, page_table=table)
    with pytest.raises(ValueError, match=r"page_table: row 0, entry 0 is page \d+, expected"):
        executor.submit(bad)
    plain.engine.executor.submit(bad).result()  # the control: without it nobody looks
    executor.submit(padding).result()
