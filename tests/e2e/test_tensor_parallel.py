"""Engines whose model several devices share say what one on one device says, and each device holds its
part of it alone.

Four devices exist only in one subprocess, which does all the work.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.tensor_parallel_runs import FIRST, HIT, PRESSED

SIZES = ("2", "4")


@pytest.fixture(scope="module")
def runs(repository, tmp_path_factory):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(repository),
    }
    folder = tmp_path_factory.mktemp("models")
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.tensor_parallel_runs", str(folder)],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name]["token_ids"] == expected[name]["token_ids"], name
        assert found[name]["cached"] == expected[name]["cached"], name
        for one, other in zip(found[name]["logprobs"], expected[name]["logprobs"], strict=True):
            assert one == pytest.approx(other, abs=1e-4), name


@pytest.mark.parametrize("size", SIZES)
def test_every_request_gets_the_tokens_of_one_device(runs, size):
    assert_same(runs[size]["outputs"], runs["1"]["outputs"])


def test_the_work_holds_what_could_go_wrong(runs):
    for size in ("1", *SIZES):
        one = runs[size]
        assert one["num_swaps"] > 0, "pages went to host RAM and back"
        assert one["outputs"]["hit"]["cached"] == 16
        assert set(one["outputs"]) == {*FIRST, *HIT, *PRESSED, "trunk", "branch", "updated"}
    outputs = runs["1"]["outputs"]
    assert outputs["updated"]["token_ids"] != outputs["greedy"]["token_ids"]
    assert outputs["trunk"]["token_ids"] != outputs["branch"]["token_ids"]
    assert len({str(one) for one in outputs["choices"]["token_ids"]}) == 3


def test_nothing_is_compiled_after_the_start(runs):
    assert [runs[size]["num_compiled"] for size in ("1", *SIZES)] == [0, 0, 0]


def test_an_8_bit_cache_is_shared_too(runs):
    assert_same(runs["int8 4"]["outputs"], runs["int8 1"]["outputs"])
    assert runs["int8 4"]["num_swaps"] > 0
    exact, rounded = (runs[name]["outputs"]["greedy"]["logprobs"][0] for name in ("1", "int8 1"))
    assert exact != pytest.approx(rounded, abs=1e-6), "it is another cache"


def test_each_device_holds_its_part(runs):
    one, two, four = (runs[size] for size in ("1", *SIZES))
    page_bytes = one["page_bytes"][0]
    assert two["page_bytes"] == [page_bytes // 2] * 2
    assert four["page_bytes"] == [page_bytes // 2] * 4, "two KV heads, each on two devices"
    whole, rows = 4 * 48, 97  # bytes of a row of the embedding, rows
    assert two["embedding_bytes"] == [whole * (rows + 1) // 2] * 2
    assert four["embedding_bytes"] == [whole * (rows + 3) // 4] * 4
    assert four["count_bytes"] == [4 * 4 * (rows + 3) // 4] * 4
    layers = {
        "norms": 2 * 48,
        "q, o": 2 * 48 * 128 + 128,
        "k, v": 2 * (48 * 32 + 32),
        "mlp": 3 * 48 * 64,
    }
    for size, found in ((2, two), (4, four)):
        cut = (layers["q, o"] + layers["mlp"]) // size
        kv = layers["k, v"] // 2
        assert found["param_bytes"] == [2 * 4 * (cut + kv + layers["norms"] + 48)] * size


def test_a_mesh_of_the_callers_is_used_as_its_rules_say(runs):
    found, expected = runs["mesh"], runs["1"]["outputs"]
    wanted = {name: expected[name] for name in FIRST}
    assert_same(found["outputs"], wanted)
    assert_same(found["again"], wanted)
    assert found["are_shared"], "params that lie where they are served are not copied"
    assert found["page_bytes"] == [runs["1"]["page_bytes"][0] // 2] * 4
    assert found["embedding_bytes"] == [4 * 48 * 98 // 2] * 4


def test_an_engine_runs_on_the_one_device_of_a_mesh(runs):
    found = runs["other device"]
    assert_same(found["outputs"], {name: runs["1"]["outputs"][name] for name in FIRST})
    assert found["devices"] == [3]


def test_params_that_lie_elsewhere_come_to_the_engines_device(runs):
    expected = {name: runs["1"]["outputs"][name] for name in FIRST}
    for found in runs["from other devices"]:
        assert_same(found, expected)


def test_a_second_start_finds_the_programs_of_the_first(runs):
    found = runs["kept"]
    assert found["num_new"] == 0
    assert found["num_kept"] > 10
    assert_same(found["outputs"], {name: runs["1"]["outputs"][name] for name in FIRST})


def test_what_cannot_be_shared_is_refused_by_name(runs):
    expected = [
        "tensor_parallel_size=8: there are 4 cpu devices",
        "num_heads=8: 3 devices cannot share it",
        "tensor_parallel_size=2: the mesh has 4 devices along 'model'",
        "axis_rules.heads='model': the mesh has no such axis, but 'tp'",
        "axis_rules name the mesh axes x, y, model: without a mesh they must name one",
        "tensor_parallel_size=2: the mesh has one device",
        "mesh must be a jax.sharding.Mesh, got 'model'",
    ]
    for message, beginning in zip(runs["refusals"], expected, strict=True):
        assert message.startswith(beginning), message
