"""The C++ attention kernel beyond what every backend is asked (test_attention.py): memory, neighbours,
threads, refusals, both builds, and how it is found."""

import concurrent.futures
import ctypes
import dataclasses
import functools
import itertools
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.native import build, load
from pallas_kernels.ragged_paged_attention import KVPages, cpu, ragged_paged_attention
from tests.pallas_kernels.ragged_cases import array_args, make_case, make_pages, oracle

call = functools.partial(ragged_paged_attention, sm_scale=0.2, backend="cpu")
ROWS = [(1, 9), (1, 700), (5, 7), (70, 210)]  # parts, a chunk of two blocks


def attend(case, **options):
    out, kv, _ = call(
        jnp.asarray(case.q), kv=make_pages(case, "cpu"), **array_args(case), **options
    )
    return np.asarray(out), kv


def rows_of(case, out) -> list[np.ndarray]:
    cu = case.cu_q_lens
    return [out[begin:end] for begin, end in itertools.pairwise(cu) if end > begin]


@pytest.mark.parametrize("rows", [[(1, 9)], [(1, 9), (1, 16)], [(1, 9), (5, 7)]])
@pytest.mark.parametrize("pages_per_row", [1, 4])
def test_pools_are_updated_in_place_without_a_copy(rows, pages_per_row):
    case = make_case(rows, pages_per_row=pages_per_row, num_pages=300, page=16, head_dim=64)

    def two_layers(q, pools, args):
        new = []
        for kv in pools:
            q, kv, _ = call(q, kv=kv, **args)
            new.append(kv)
        return q, new

    pools = [make_pages(case, "cpu") for _ in range(2)]
    args = (jnp.asarray(case.q), pools, array_args(case))
    compiled = jax.jit(two_layers, donate_argnums=1).lower(*args).compile()
    size = pools[0].data[0].nbytes
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == 2 * size
    assert analysis.temp_size_in_bytes < size / 10
    shape = ",".join(map(str, pools[0].data[0].shape))
    assert f"f32[{shape}]" in compiled.as_text()
    assert not [
        line for line in compiled.as_text().splitlines() if shape in line and " copy(" in line
    ]
    before = [kv.data[0].unsafe_buffer_pointer() for kv in pools]
    _, after = compiled(*args)
    assert [kv.data[0].unsafe_buffer_pointer() for kv in after] == before
    assert pools[0].data[0].is_deleted()


def test_a_pool_that_is_not_donated_stays_as_it_was():
    case = make_case(ROWS, page=16, head_dim=64)
    kv = make_pages(case, "cpu")
    before = np.array(kv.data[0])
    _, new, _ = jax.jit(call)(jnp.asarray(case.q), kv=kv, **array_args(case))
    assert np.array_equal(np.asarray(kv.data[0]), before, equal_nan=True)
    assert not np.array_equal(np.asarray(new.data[0]), before, equal_nan=True)


def test_a_row_is_the_same_bit_for_bit_whatever_its_neighbours_and_the_bucket():
    together = make_case(ROWS, page=16, heads=(9, 3), head_dim=64)
    out, kv = attend(together)
    table = together.page_table.reshape(len(ROWS), -1)
    for index, (found, row) in enumerate(zip(rows_of(together, out), ROWS, strict=True)):
        begin, end = together.cu_q_lens[index : index + 2]
        single = int(row[0] == 1)

        def of_the_row(array, begin=begin, end=end):
            return jnp.asarray(np.pad(array[begin:end], ((0, 9), (0, 0), (0, 0))))

        # The row alone, in its pages, in a larger bucket.
        alone, _, _ = call(
            of_the_row(together.q),
            of_the_row(together.k_new),
            of_the_row(together.v_new),
            kv,
            kv_lens=jnp.array([row[1], 0], jnp.int32),
            page_table=jnp.concatenate([table[index], 0 * table[0]]),
            kv_starts=None,
            cu_q_lens=jnp.array([0, row[0], row[0]], jnp.int32),
            ranges=jnp.array([single, single, 1], jnp.int32),
        )
        assert np.array_equal(np.asarray(alone)[: row[0]], found)
        assert not np.asarray(alone)[row[0] :].any()


def test_long_rows_take_larger_parts():
    case = make_case([(1, 9000), (1, 4097)], page=64, heads=(2, 1), head_dim=16)
    out, _ = attend(case)
    expected = oracle(case, sm_scale=0.2)[0]
    assert np.abs(out[:2] - expected[:2]).max() < 2e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"page_table": lambda a: np.where(a == a[0], 999, a)},
            r"row 0: page id 999 of a pool of \d+ pages",
        ),
        ({"page_table": lambda a: np.where(a == a[0], -1, a)}, "row 0: page id -1"),
        ({"kv_lens": lambda a: a * 0}, "row 0: 0 tokens in its pages, expected 1 to"),
        ({"kv_lens": lambda a: a + 10**6}, r"row 0: 10000\d\d tokens in its pages"),
        ({"cu_q_lens": lambda a: a + 50}, r"row 3: tokens \[57, 127\) of 77"),
        ({"cu_q_lens": lambda a: a[::-1].copy()}, "row 0: tokens"),
        ({"ranges": lambda a: a + 90}, r"ranges\[2\] is \d+, of 4 rows"),
    ],
)
def test_what_would_be_read_wild_is_refused(change, message):
    case = make_case(ROWS, page=16, head_dim=64)
    args = array_args(case)
    args |= {name: jnp.asarray(spoil(np.asarray(args[name]))) for name, spoil in change.items()}
    # jax raises the one where the call waits for itself, the other where its result is waited for.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(
            jax.jit(call)(jnp.asarray(case.q), kv=make_pages(case, "cpu"), **args)[0]
        )


def test_vmap_is_refused():
    case = make_case([(1, 9)], page=16, head_dim=64)
    kv = make_pages(case, "cpu")
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(lambda q: call(q, kv=kv, **array_args(case))[0])(jnp.asarray(case.q)[None])


def test_an_exported_program_runs():
    case = make_case(ROWS, page=16, head_dim=64)
    args = array_args(case)
    kv = make_pages(case, "cpu")

    def step(q, pool, args):
        out, after, _ = call(q, kv=dataclasses.replace(kv, data=(pool,)), **args)
        return out, after.data[0]

    q = jnp.asarray(case.q)
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in dispatch.BACKENDS["cpu"].custom_calls
    ]
    exported = jax.export.export(jax.jit(step), disabled_checks=checks)(q, kv.data[0], args)
    again = jax.export.deserialize(exported.serialize())
    out, pool = again.call(q, kv.data[0], args)
    expected, after = attend(case)
    assert np.array_equal(np.asarray(out), expected)
    assert np.array_equal(np.asarray(pool), np.asarray(after.data[0]), equal_nan=True)


def test_many_threads_and_shapes_at_once():
    """XLA's pool has few threads; calls from more of them neither hang nor disturb each other."""
    cases = [
        make_case(rows, page=16, heads=(6, 2), head_dim=32, seed=seed)
        for seed, rows in enumerate([ROWS, [(1, 300)] * 5, [(90, 90)], [(1, 1)]])
    ]
    step = jax.jit(call)
    expected = [attend(case)[0] for case in cases]
    inputs = [(jnp.asarray(c.q), make_pages(c, "cpu"), array_args(c)) for c in cases]

    def repeat(number):
        for turn in range(25):
            index = (number + turn) % len(cases)
            q, kv, args = inputs[index]
            assert np.array_equal(np.asarray(step(q, kv=kv, **args)[0]), expected[index])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(repeat, range(8)))


@pytest.mark.parametrize("level", [name for name, _, _ in build.levels()])
def test_every_build_that_this_cpu_runs(level, monkeypatch):
    needs = {name: set(flags) for name, _, flags in build.levels()}[level]
    if not needs <= load.cpu_flags():
        pytest.skip(f"this CPU does not run {level}")
    load.register()
    library = ctypes.cdll.LoadLibrary(str(build.object_path(level)))
    target = f"attention_{level}"
    jax.ffi.register_ffi_target(
        target, jax.ffi.pycapsule(getattr(library, cpu.TARGET)), platform="cpu"
    )
    monkeypatch.setattr(cpu, "TARGET", target)
    for case in (
        make_case(ROWS, page=16, heads=(9, 3), head_dim=64),
        make_case([(1, 33), (20, 40)], page=4, heads=(4, 2), head_dim=48),
    ):
        for options in ({}, {"window": 20}, {"soft_cap": 2.0}):
            out, _ = attend(case, **options)
            expected = oracle(case, sm_scale=0.2, **options)[0]
            last = case.cu_q_lens[-1]
            assert np.abs(out[:last] - expected[:last]).max() < 1e-5


def test_the_best_object_that_the_cpu_runs_is_taken(tmp_path, monkeypatch):
    (best, _, needs), (second, _, fewer) = build.LEVELS["x86_64"]
    monkeypatch.setattr(load, "levels", lambda: build.LEVELS["x86_64"])
    find = load.find_object.__wrapped__

    monkeypatch.setattr(load, "cpu_flags", lambda: frozenset(needs))
    assert "the install found no compiler" in find(tmp_path)[1]
    for level in (best, second):
        make_object(build.object_path(level, tmp_path), b"an object")
    assert find(tmp_path)[0] == build.object_path(best, tmp_path)
    monkeypatch.setattr(load, "cpu_flags", lambda: frozenset(fewer))
    assert find(tmp_path)[0] == build.object_path(second, tmp_path)
    monkeypatch.setattr(load, "cpu_flags", lambda: frozenset({"sse2"}))
    path, reason = find(tmp_path)
    assert path is None
    assert "no build of the C++ kernels runs on this" in reason


def make_object(path, content):
    path.write_bytes(content)
    build.digest_path(path).write_text(build.digests(path))


def find_only(path, monkeypatch):
    """As `load` finds the one object, in the folder of `path`, on a CPU that runs it."""
    monkeypatch.setattr(load, "levels", lambda: (("one", (), ()),))
    return load.find_object.__wrapped__(path.parent)


def test_an_object_that_is_not_whole_is_not_loaded(tmp_path, monkeypatch):
    """Loading one that is cut off ends the process with SIGBUS."""
    path = build.object_path("one", tmp_path)
    make_object(path, b"an object")
    assert find_only(path, monkeypatch) == (path, "")
    path.write_bytes(b"an obj")
    assert find_only(path, monkeypatch)[0] is None
    assert "kernels-one.so is damaged, or other sources made it" in find_only(path, monkeypatch)[1]
    build.digest_path(path).unlink()
    assert "kernels-one.so cannot be checked" in find_only(path, monkeypatch)[1]
    assert "native.build builds it anew" in find_only(path, monkeypatch)[1]


def test_an_object_of_other_sources_is_not_loaded(tmp_path, monkeypatch):
    """As after an update of a checkout: its targets may take other arguments."""
    path = build.object_path("one", tmp_path)
    make_object(path, b"an object")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert "other sources made it" in find_only(path, monkeypatch)[1]


def test_an_object_that_cannot_be_loaded_is_missing_and_says_why(tmp_path, monkeypatch):
    path = build.object_path("one", tmp_path)
    make_object(path, b"no object at all")
    monkeypatch.setattr(load, "find_object", lambda: (path, ""))
    monkeypatch.setattr(load, "_open", load._open.__wrapped__)
    assert "kernels-one.so cannot be loaded: " in load.missing()
    with pytest.raises(NotImplementedError, match="cannot be loaded"):
        load.register.__wrapped__()
    demand = dispatch.Demand(platform="cpu", dtype="float32", kv_dtype="float32", head_dim=64)
    assert dispatch.resolve_backend("auto", demand) == "xla"
    assert "cannot be loaded" in dispatch.explain_backend("auto", demand)


def test_a_build_that_fails_says_why(tmp_path, monkeypatch):
    broken = tmp_path / "broken.cc"
    broken.write_text("int main( {")
    monkeypatch.setattr(build, "SOURCES", (broken,))
    with pytest.raises(build.BuildError, match=r"failed:\n.*broken\.cc"):
        build.build(tmp_path)
    assert not list(tmp_path.glob("*.so"))
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler: looked for no-such-compiler"):
        build.build(tmp_path)


def test_the_sources_are_compiled_without_a_warning(tmp_path):
    """Only their syntax and types: it takes a second."""
    command = [build.compiler(), "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    command += [
        "-Wno-psabi",
        "-isystem",
        str(build.include_folder()),
        "-I",
        str(build.PACKAGE_ROOT),
    ]
    for source in build.SOURCES:
        done = subprocess.run([*command, str(source)], capture_output=True, text=True)
        assert not done.stderr, done.stderr


def test_pages_of_another_layout_are_refused():
    case = make_case([(1, 9)], page=16, head_dim=64)
    kv = KVPages.zeros("split", 4, 16, 2, 64, "float32")
    with pytest.raises(NotImplementedError, match=r"layout=split: .*'cpu' serves head_major"):
        call(jnp.asarray(case.q), kv=kv, **array_args(case))
