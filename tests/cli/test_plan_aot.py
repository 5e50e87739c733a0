"""`jaxserve plan --aot`: what the TPU compiler says of a chip's memory is what was planned: `-m aot`.

libtpu comes from the environment that scripts/tpu_aot makes for itself (the first call downloads it).
"""

import dataclasses
import json
import sys

import pytest

from jaxserve.cli.main import main
from jaxserve.plan.chips import CHIPS
from scripts.aot.environment import environment_python, running

# Few rows: the sampler takes the compiler longest.
LIMITS = ["--max_num_seqs=16", "--max_num_batched_tokens=256", "--max_model_len=2048"]


@pytest.fixture(scope="module")
def libtpu():
    python = environment_python(
        "tpu_aot",
        [f"jax[tpu]=={running('jax')[0].removeprefix('jax==')}", *running("flax", "jaxtyping")],
        size="about 1.4 GB",
        say=lambda text: print(text, file=sys.stderr),
    )
    (library,) = python.parent.parent.glob("lib/python3*/site-packages/libtpu/libtpu.so")
    return library


@pytest.mark.aot
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--model=smollm2-135m", "--chip=v6e", "--aot_layers=2"],
        ["--model=llama-3-8b", "--chip=v5e", "--num_chips=8", "--aot_layers=2"],
        ["--model=llama-3-70b", "--chip=v5e", "--num_chips=16", "--aot_layers=1"],
        ["--model=qwen3-8b", "--chip=v5p", "--kv_cache_dtype=int8", "--aot_layers=1"],
    ],
)
def test_the_compiler_agrees_within_5_percent(libtpu, arguments, capsys):
    assert main(["plan", *arguments, *LIMITS, "--aot", f"--libtpu={libtpu}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["aot"]
    assert found["fault"] == ""
    assert abs(found["difference"]) < 0.05
    assert found["hbm_bytes"] == found["resident_bytes"] + found["step_bytes"]
    # weights and pages are no estimate: to a kilobyte for each array
    assert abs(found["resident_bytes"] / found["planned_resident_bytes"] - 1) < 1e-3


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_a_pool_that_the_chip_cannot_hold_is_a_fault(libtpu, capsys, monkeypatch):
    """The control: pages for more memory than there is are refused by the compiler."""
    larger = dataclasses.replace(CHIPS["v5e"], hbm_bytes=25 * 10**9)
    monkeypatch.setitem(CHIPS, "v5e", larger)
    arguments = ["--model=smollm2-135m", "--chip=v5e", *LIMITS, "--aot", f"--libtpu={libtpu}"]
    assert main(["plan", *arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["aot"]
    assert found["fault"].startswith("layers: ")
    assert "hbm" in found["fault"].lower()
    assert found["hbm_bytes"] is found["difference"] is None
