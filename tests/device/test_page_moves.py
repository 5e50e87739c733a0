"""Page moves through the executor: to the bit, in order, in place, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxserve.device.compile_counter import CompileCounter
from jaxserve.device.host_storage import MAX_UNDER_WAY, HostStorage
from jaxserve.device.page_moves import COPY_SIZES, MOVE_SIZES
from tests.device.executors import (
    NUM_HOST_PAGES,
    NUM_PAGES,
    TINY,
    Slice,
    fill_pages,
    make_batch,
    make_executor,
    page_bits,
    shared_executor,
    shared_pages,
)

DTYPES = ("float32", "bfloat16", "int8", "fp8_e4m3")
POOLS = [
    *((dtype, "split") for dtype in DTYPES),
    ("float32", "head_major"),
    ("fp8_e4m3", "head_major"),
    ("float32", "tpu"),
]
PROMPT = [5, 9, 200, 31, 7, 77, 450]


def run(executor, *slices, **options):
    return executor.submit(make_batch(*slices, **options)).result()


def move(executor, **moves):
    """What `submit` does before the step."""
    batch = make_batch(**moves)
    executor._moves.check(batch)
    executor._moves.start(batch, executor._kv_pages)


def assert_pages(executor, before, expected):
    """The pool is as `before`, but that page p holds what expected[p] held; page 0 is nobody's."""
    wanted = before.copy()
    for page, source in expected.items():
        wanted[:, page] = before[:, source]
    np.testing.assert_array_equal(page_bits(executor)[:, 1:], wanted[:, 1:])


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("count", [1, 3, MOVE_SIZES[-1], 2 * MOVE_SIZES[-1] + 3])
def test_copies_are_exact_and_touch_nothing_else(pool, count):
    executor = shared_pages(*pool)
    fill_pages(executor, seed=count)
    before = page_bits(executor)
    order = np.random.default_rng(count).permutation(NUM_PAGES - 1) + 1
    copies = [(int(order[i]), int(order[-1 - i])) for i in range(count)]
    move(executor, copies=copies)
    assert_pages(executor, before, {target: source for source, target in copies})


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("count", [1, 2 * MOVE_SIZES[-1] + 3])
def test_pages_come_back_from_the_host_to_the_bit(pool, count):
    executor = shared_pages(*pool)
    fill_pages(executor, seed=count)
    before = page_bits(executor)
    pages = range(1, count + 1)
    places = [NUM_HOST_PAGES - page for page in pages]
    move(executor, moves_out=list(zip(pages, places, strict=True)))
    executor._moves.storage.check_invariants()
    assert_pages(executor, before, {})
    fill_pages(executor, seed=count + 1)
    other = page_bits(executor)
    move(executor, moves_in=[(place, NUM_PAGES - 1 - i) for i, place in enumerate(places)])
    expected = other.copy()
    for i, page in enumerate(pages):
        expected[:, NUM_PAGES - 1 - i] = before[:, page]
    np.testing.assert_array_equal(page_bits(executor)[:, 1:], expected[:, 1:])


def test_out_then_copies_then_in():
    """A page leaves before it is copied over, and is copied before it is moved into, in one step."""
    executor = shared_executor()
    fill_pages(executor)
    before = page_bits(executor)
    run(executor, moves_out=[(9, 0)])
    run(executor, moves_out=[(4, 1), (7, 2)], copies=[(5, 4), (7, 8)], moves_in=[(0, 7)])
    assert_pages(executor, before, {4: 5, 8: 7, 7: 9})
    run(executor, moves_out=[(4, 3)], copies=[(10, 4)], moves_in=[(1, 4)])
    run(executor, moves_in=[(2, 11), (3, 12)])
    assert_pages(executor, before, {8: 7, 7: 9, 11: 7, 12: 5})


def test_a_step_reads_the_page_that_was_copied_for_it():
    """The prompt's tokens stand in page 1 and, in the middle, page 2; another branch goes on in a copy."""
    executor = shared_executor()
    executor.reset()
    run(executor, Slice(PROMPT[:6], [1, 2], samples=False))
    after = run(executor, Slice(PROMPT[6:], [1, 2], start=6), copies=[(2, 3)])
    shared = page_bits(executor)[:, 1]
    branch = run(executor, Slice(PROMPT[6:], [1, 3], start=6))
    np.testing.assert_array_equal(branch.token_ids, after.token_ids)
    np.testing.assert_array_equal(branch.logprobs, after.logprobs)
    np.testing.assert_array_equal(page_bits(executor)[:, 1], shared)
    wrong = run(executor, Slice(PROMPT[6:], [1, 4], start=6))  # the control: a page of zeros
    assert wrong.logprobs[0, 0] != after.logprobs[0, 0]


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "fp8_e4m3"])
def test_a_sequence_goes_on_after_a_swap_as_if_nothing_had_been(kv_cache_dtype):
    executor = shared_executor(TINY, kv_cache_dtype)
    executor.reset()
    run(executor, Slice(PROMPT, [1, 2]))
    plain = run(executor, Slice([3], [1, 2], start=7), wants_candidates=True)
    # Swapped out and in one submit later, without waiting; its pages are taken by another at once.
    executor.submit(make_batch(Slice(PROMPT[::-1], [2, 1]), moves_out=[(1, 30), (2, 31)]))
    handle = executor.submit(
        make_batch(
            Slice([3], [21, 20], start=7), wants_candidates=True, moves_in=[(30, 21), (31, 20)]
        )
    )
    back = handle.result()
    for name in ("token_ids", "logprobs", "candidate_ids", "candidate_logprobs"):
        np.testing.assert_array_equal(getattr(back, name), getattr(plain, name))
    wrong = run(executor, Slice([3], [1, 2], start=7))  # the control: what stands there now
    assert wrong.logprobs[0, 0] != plain.logprobs[0, 0]


def test_a_host_page_may_be_used_again_at_once():
    """What is on its way in is not what comes to the host page afterwards, although nobody waits."""
    executor = shared_executor()
    fill_pages(executor)
    before = page_bits(executor)
    run(executor, moves_out=[(page, page) for page in range(1, 18)])
    handles = [executor.submit(make_batch(moves_in=[(page, 20 + page) for page in range(1, 18)]))]
    for source in (41, 42, 43):  # the newest is what counts
        moves = [(source, page) for page in range(1, 18)]
        handles.append(executor.submit(make_batch(moves_out=moves)))
    handles.append(executor.submit(make_batch(moves_in=[(5, 19)])))
    for handle in handles:
        handle.result()
    assert_pages(executor, before, {**{20 + p: p for p in range(1, 18)}, 19: 43})


def test_reset_forgets_pages_on_their_way():
    executor = shared_executor()
    storage = executor._moves.storage
    fill_pages(executor)
    run(executor, moves_out=[(1, 0)])
    before = storage.read(np.array([0]), slice(2))
    executor.submit(make_batch(moves_out=[(2, 0)]))
    executor.reset()
    storage.settle()
    assert storage.read(np.array([0]), slice(2)).tobytes() == before.tobytes()


def test_pages_are_updated_in_place_and_nothing_compiles():
    executor = shared_executor()

    def pointers():
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(executor._kv_pages)]

    before, counter = pointers(), CompileCounter()
    many = list(range(1, 12))
    run(executor, moves_out=[(p, p) for p in many], copies=[(p, p + 20) for p in many])
    run(executor, Slice([1, 2], [3]), moves_in=[(p, p) for p in many], wants_candidates=True)
    assert pointers() == before
    assert counter.count == 0


@pytest.mark.parametrize("kv_cache_dtype", DTYPES)
def test_no_program_takes_memory_like_a_pool(kv_cache_dtype):
    executor = shared_pages(kv_cache_dtype)
    pool = sum(leaf.nbytes for leaf in jax.tree.leaves(executor._kv_pages))
    kinds = [("copy_pages", n) for n in COPY_SIZES] + [
        (name, n) for name in ("gather_pages", "scatter_pages") for n in MOVE_SIZES
    ]
    for key in kinds:
        memory = executor._programs[key].memory_analysis()
        assert memory is not None
        moved = key[1] * pool / NUM_PAGES
        assert memory.temp_size_in_bytes <= 1.1 * moved, key
        if key[0] != "gather_pages":
            assert memory.alias_size_in_bytes == pool, key


def test_storage_gives_copies_and_bounds_what_is_under_way():
    storage = HostStorage(3, (2, 1, 2, 4, 8), np.float32)
    for i in range(MAX_UNDER_WAY + 2):
        part = jax.numpy.full((4, 2, 1, 2, 4, 8), i, np.float32)
        storage.receive(np.array([i % 3]), [slice(2)], [part])
        storage.check_invariants()
    assert (storage.read(np.array([0]), slice(2)) == MAX_UNDER_WAY + 1).all()
    first = storage.read(np.array([1, 0]), slice(1, 2))
    first[:] = -1
    assert (storage.read(np.array([1, 0]), slice(1, 2)) != -1).all()
    storage.receive(np.array([7]), [slice(2)], [jax.numpy.zeros((4, 2, 1, 2, 4, 8))])
    with pytest.raises(AssertionError):
        storage.check_invariants()


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ({"copies": [(1, 2), (2, 3)]}, r"copies\[0\] = \(1, 2\): copies\[1\] reads page 2"),
        ({"copies": [(1, NUM_PAGES)]}, rf"page {NUM_PAGES} is not in \[1, {NUM_PAGES}\)"),
        ({"moves_out": [(1, 0), (0, 1)]}, r"moves_out\[1\]: page 0 is not in \[1, 48\)"),
        ({"moves_out": [(1, 40)]}, r"moves_out\[0\]: host page 40 is not in \[0, 40\)"),
        ({"moves_out": [(1, 4), (2, 4)]}, "moves_out: host page 4 is written twice"),
        ({"moves_in": [(0, 1), (-1, 2)]}, r"moves_in\[1\]: host page -1 is not in \[0, 40\)"),
        ({"moves_in": [(0, 48)]}, r"moves_in\[0\]: page 48 is not in \[1, 48\)"),
        ({"moves_in": [(0, 2), (1, 2)]}, "moves_in: page 2 is written twice"),
        (
            {"moves_out": [(1, 3)], "moves_in": [(3, 2)]},
            "moves_in: host page 3 is moved out in the same step",
        ),
    ],
)
def test_check_batches_refuses_moves_that_do_not_fit(moves, message):
    executor = shared_executor()
    fill_pages(executor)
    before = page_bits(executor)
    with pytest.raises(ValueError, match=message):
        executor.submit(make_batch(**moves))
    np.testing.assert_array_equal(page_bits(executor), before)


def test_check_batches_refuses_pairs_of_another_form():
    flat = dataclasses.replace(make_batch(), copies=np.zeros(4, np.int32))
    with pytest.raises(ValueError, match=r"copies: int32\[4\], expected int32\[2, n\]"):
        shared_executor().submit(flat)


def test_without_host_pages_nothing_leaves_the_device():
    executor = make_executor(num_host_pages=0)
    assert executor.costs.page_move_s == float("inf")
    with pytest.raises(KeyError, match="gather_pages"):
        executor._programs["gather_pages", MOVE_SIZES[0]]
    with pytest.raises(ValueError, match="host_kv_gib=0"):
        executor.submit(make_batch(moves_out=[(1, 0)]))
    run(executor, copies=[(1, 2)])


def test_costs_are_measured():
    costs = shared_executor().costs
    assert 0 < costs.token_s < 1
    assert 0 < costs.page_move_s < 1
