"""scripts/device_check in its tiny size: every part reports, a wrong kernel is a fault, the peer is fair."""

import functools
import importlib
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.model.attention import AttentionKernel
from jaxserve.model.registry import build_model
from jaxserve.weights.load_model import load_model
from tests.llms import TINY, greedy, shared_llm


@pytest.fixture(scope="module")
def part():
    """Modules of scripts/device by name."""
    return lambda name: importlib.import_module(f"scripts.device.{name}")


def test_every_part_reports(repository, tmp_path):
    output = tmp_path / "report.json"
    command = [sys.executable, "scripts/device_check", "--size=tiny", "--seed=5"]
    done = subprocess.run(
        [*command, f"--output={output}"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert (report["backend"], report["dtype"], report["seed"]) == ("cpu", "float32", 5)
    parts = {}
    for row in report["rows"]:
        assert row["fault"] == ""
        parts.setdefault(row["part"], []).append(row)
        assert row["name"] in done.stdout
    assert parts.keys() == {"attention", "copies", "device", "decode", "chunk", "engine"}
    assert len(parts["attention"]) == len(parts["copies"]) == 3
    names = [row["name"] for row in parts["engine"]]
    assert names == [
        "start",
        *(f"{n} seqs {arm}" for arm in ("engine", "dense loop") for n in (1, 4)),
    ]
    figures = [value for row in report["rows"] for value in row["figures"].values()]
    assert all(value > 0 for value in figures if isinstance(value, float))


def test_a_wrong_kernel_is_a_fault(part, monkeypatch):
    right, report = part("right"), part("report")
    real = right.ragged_paged_attention

    def wrong(*args, backend, **options):
        out, kv, lse = real(*args, backend=backend, **options)
        return (out * 1.01 if backend == "xla" else out), kv, lse

    monkeypatch.setattr(right, "ragged_paged_attention", wrong)
    (row,) = right.check_attention(
        "xla",
        seed=1,
        num_calls=1,
        dtype="float32",
        page_size=16,
        longest=40,
        deadline=report.Deadline(60),
    )
    assert row.fault == "differs"
    assert row.figures["out_error"] > 2e-5


def test_nothing_begins_when_the_time_is_over(part):
    right, report = part("right"), part("report")
    (row,) = right.check_attention(
        "xla",
        seed=1,
        num_calls=9,
        dtype="float32",
        page_size=16,
        longest=40,
        deadline=report.Deadline(-1),
    )
    assert row.figures == {"skipped": "out of time"}


def test_the_dense_loop_gives_the_tokens_of_the_engine(part):
    """The peer computes the same model: else its speed would say nothing."""
    serve = part("serve")
    prompt = [5, 6, 7, 8]
    loaded = load_model(str(TINY), EngineConfig(dtype="float32"))
    model = build_model(loaded.config, jnp.dtype("float32"), AttentionKernel(backend="xla"))
    params = jax.tree.map(jnp.asarray, loaded.params)
    step = jax.jit(functools.partial(serve.dense_step, model))
    cache = serve.dense_cache(loaded.config, 2, jnp.float32)
    tokens = list(prompt)
    for position in range(len(prompt) + 3):
        ids = jnp.full(2, tokens[position], jnp.int32)
        ids, cache = step(params, cache, ids, jnp.int32(position))
        if position >= len(prompt) - 1:
            tokens.append(int(ids[1]))
    (output,) = shared_llm().generate([prompt], greedy(4))
    assert np.array_equal(tokens[len(prompt) :], output.outputs[0].token_ids)
