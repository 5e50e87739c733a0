"""Replicas on devices of their own: four CPU devices, which exist only in the subprocess."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def found(repository):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(repository),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.replicas.on_devices"],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_outputs_are_those_of_one_device_though_pages_run_out(found):
    assert found["outputs"] == found["expected"]
    assert all(ids for choices in found["expected"] for ids in choices)
    assert found["num_preemptions"] > 0


def test_each_replica_has_a_device_of_its_own_and_works(found):
    assert found["devices"] == [[0], [1]]
    assert min(found["num_steps"]) > 3
    assert found["num_pages"] == 12


def test_no_request_compiles_anything(found):
    assert found["num_compiled"] == 0
    assert found["has_compiled"]


def test_a_callers_mesh_is_cut_along_its_axis_for_data_and_new_weights_reach_all(found):
    """Two replicas of two devices each."""
    case = found["embedded"]
    assert case["devices"] == [[0, 1], [2, 3]]
    assert case["before"]
    assert case["after"]
    assert case["differ"]
    assert "must have one axis of that size that no axis rule names" in case["refused"]


def test_too_few_devices_are_refused(found):
    few, pairs = found["refusals"]
    assert "needs 5 devices: there are 4 cpu devices" in few
    assert "data_parallel_size=2 with tensor_parallel_size=4 needs 8 devices" in pairs
