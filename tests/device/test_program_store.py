"""Programs kept on disk: found again, called like the originals, never served when anything differs."""

import dataclasses
import hashlib
import logging
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.device.program_store import ProgramStore
from jaxserve.device.programs import Program, ProgramTable
from pallas_kernels.native import load
from pallas_kernels.native.lazy_zeros import TARGET, lazy_zeros


class Pair(NamedTuple):
    low: Any
    high: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Box:
    content: Any
    label: str = dataclasses.field(metadata={"static": True})


ARRAY = jax.ShapeDtypeStruct((3,), jnp.float32)
GIVEN = (Box(jnp.arange(3.0), "a"), {"x": jnp.ones(3), "y": [jnp.zeros(3)]}, None)


def make_program(**changes: Any) -> tuple[Program, list[str]]:
    """A program that returns every kind of container, and the list that it is traced into."""
    traced: list[str] = []

    def function(box, tree, nothing):
        traced.append("traced")
        total = box.content + tree["x"] + tree["y"][0]
        return Box(total, box.label), [Pair(total - 1, total + 1)], ({"tree": tree}, {7: nothing})

    program = Program(
        key=("sums", 3), function=function, arguments=GIVEN, donated=(0,), returns=(Pair,)
    )
    return dataclasses.replace(program, **changes), traced


def run(folder, identity="us", program=None, given=GIVEN, **options):
    """(what the program returns, how often it was traced, how many the store traced)."""
    program, traced = program or make_program()
    store = ProgramStore(folder, identity, **options)
    table = ProgramTable(store)
    table.compile_all([program])
    result = table[program.key](*jax.tree.map(jnp.array, given))
    return result, len(traced), store.num_traced


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_a_second_start_traces_nothing_and_returns_the_same(tmp_path):
    first, num_first, _ = run(tmp_path)
    second, num_second, num_stored = run(tmp_path)
    assert (num_first, num_second, num_stored) == (1, 0, 0)
    assert jax.tree.structure(second) == jax.tree.structure(first)
    jax.tree.map(np.testing.assert_array_equal, second, first)
    box, (pair,), rest = second
    assert box.label == "a"
    np.testing.assert_array_equal(pair.high, [2, 3, 4])
    assert rest[1] == {7: None}


def test_donated_arguments_are_given_up(tmp_path):
    for _ in range(2):
        program, _ = make_program()
        table = ProgramTable(ProgramStore(tmp_path, "us"))
        table.compile_all([program])
        box, *others = jax.tree.map(jnp.array, GIVEN)
        table[program.key](box, *others)
        assert box.content.is_deleted()
        assert not others[0]["x"].is_deleted()


@pytest.mark.parametrize(
    ("identity", "changes"),
    [
        ("others", {}),
        ("us", {"key": ("sums", 4)}),
        ("us", {"donated": ()}),
        ("us", {"arguments": (Box(ARRAY, "b"), *GIVEN[1:])}),
        ("us", {"arguments": jax.tree.map(lambda x: x.astype(jnp.int32), GIVEN)}),
    ],
)
def test_whatever_differs_is_traced_again(tmp_path, identity, changes):
    run(tmp_path)
    program, traced = make_program(**changes)
    ProgramStore(tmp_path, identity)(program)
    assert traced == ["traced"]
    assert len(list(tmp_path.iterdir())) == 2


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage", [flip, lambda c: c[:-1], lambda c: b"", lambda c: b"x" + c, lambda c: c + b"\0"]
)
def test_a_damaged_file_is_said_and_made_anew(tmp_path, caplog, damage):
    expected, *_ = run(tmp_path)
    path = only_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "jaxserve"):
        result, num_traced, _ = run(tmp_path)
    assert num_traced == 1
    assert f"{path} is damaged" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert run(tmp_path)[1] == 0  # and is whole again


def test_a_whole_file_of_another_program_is_not_served(tmp_path, caplog):
    run(tmp_path)
    path = only_file(tmp_path)
    magic, body = path.read_bytes().split(b"\n", 1)
    body = body[32:].replace(b'{"digest": "', b'{"digest": "0', 1)
    path.write_bytes(magic + b"\n" + hashlib.sha256(body).digest() + body)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        assert run(tmp_path)[1] == 1
    assert "is another one" in caplog.text


def test_a_folder_that_cannot_be_written_costs_the_keeping_only(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    table = ProgramTable(ProgramStore(file / "programs", "us"))
    programs = [make_program(key=("sums", i))[0] for i in (1, 2)]
    with caplog.at_level(logging.WARNING, "jaxserve"):
        table.compile_all(programs)
    assert len(table) == 2
    assert [r.message for r in caplog.records if "cannot be kept" in r.message][1:] == []
    assert "cannot be kept" in caplog.text


def test_a_store_that_only_reads_finds_what_is_there_and_keeps_nothing(tmp_path, caplog):
    run(tmp_path / "full")
    with caplog.at_level(logging.WARNING, "jaxserve"):
        for folder, num_traced in (("full", 0), ("empty", 1), ("empty", 1)):
            assert run(tmp_path / folder, can_write=False)[1] == num_traced
    assert not (tmp_path / "empty").exists()
    assert caplog.text == ""


def test_the_entries_unused_for_longest_make_room(tmp_path):
    store = ProgramStore(tmp_path, "us")
    programs = [make_program(key=("sums", i))[0] for i in range(4)]
    for program in programs:
        store(program)
    for age, name in enumerate(("sums-2", "sums-0", "sums-3")):
        (path,) = tmp_path.glob(f"{name}-*")
        os.utime(path, (10 - age, 10 - age))
    (tmp_path / "somebody-else").write_text("")
    store(programs[3])  # used: it is the youngest again
    store.prune(limit=2)
    names = sorted(path.name.rpartition("-")[0] for path in tmp_path.iterdir())
    assert names == ["somebody", "sums-1", "sums-3"]
    assert store.count(programs) == 2


def test_what_a_killed_process_left_is_removed_in_time(tmp_path):
    store = ProgramStore(tmp_path, "us")
    old, new = tmp_path / "scratch-old", tmp_path / "scratch-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "sums-3.program").write_text("half")
    os.utime(old, (10, 10))
    store.prune()
    assert list(tmp_path.iterdir()) == [new]


def test_a_class_that_nobody_named_is_refused(tmp_path):
    program, _ = make_program(returns=())
    with pytest.raises(TypeError, match=r"a Pair that it is not given: .*Program.returns"):
        ProgramStore(tmp_path, "us")(program)


@pytest.mark.skipif(load.missing() is not None, reason="the C++ kernels are not built")
def test_programs_that_call_our_kernels_are_kept_when_these_are_named(tmp_path):
    def make() -> Program:
        return Program(key=("zeros", 0), function=lambda: lazy_zeros((5,), "float32"), arguments=())

    with pytest.raises(ValueError, match=TARGET):
        ProgramStore(tmp_path, "us")(make())
    for num_traced in (1, 0):
        store = ProgramStore(tmp_path, "us", [TARGET])
        table = ProgramTable(store)
        table.compile_all([make()])
        np.testing.assert_array_equal(table["zeros", 0](), np.zeros(5, np.float32))
        assert store.num_traced == num_traced
