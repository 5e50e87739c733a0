"""scripts/parity_report: tiny_llama is within its tolerance, and what is not ends with 1."""

import math
import runpy
import subprocess
import sys

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.weights.load_model import load_model
from scripts.parity import comparison
from scripts.parity.comparison import Row
from scripts.parity.plain_forward import PlainForward
from tests import numpy_llama
from tests.checkpoints import make_random_llama
from tests.llms import TINY, shared_llm

SMALL = ["--num_prompts=3", "--prompt_tokens=20", "--max_tokens=4", "--chunk=6"]


def run(repository, *flags: str, model=TINY) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/parity_report", f"--model={model}", *SMALL, *flags]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


def test_the_engine_says_what_a_plain_forward_says(repository):
    done = run(repository)
    assert done.returncode == 0, done.stdout + done.stderr
    table = {
        line[:28].strip(): line[28:].split()
        for line in done.stdout.splitlines()
        if line.startswith(("sampled", "scored"))
    }
    assert list(table) == [
        "sampled",
        "sampled after a prefix hit",
        "scored, whole",
        "scored after a prefix hit",
    ]
    assert [int(row[0]) for row in table.values()] == [12, 12, 3 * 23 - (0 + 1 + 2), 12]
    assert int(table["sampled after a prefix hit"][1]) > 0
    assert int(table["scored after a prefix hit"][1]) > 0
    assert int(table["scored, whole"][1]) == 0
    assert all(0 <= float(row[3]) <= float(row[2]) <= 1e-4 for row in table.values())
    assert done.stdout.endswith("all within 0.0001\n")


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_model_is_within_the_tolerance_too(repository, real_model_directory):
    """Its activations are far larger than those of random weights: where sums lose their last bits."""
    done = run(repository, "--prompt_tokens=24", "--chunk=4", model=real_model_directory)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("largest", "code"), [(2e-5, 1), (math.nan, 1), (1e-5, 0)])
def test_what_lies_above_the_tolerance_ends_with_1(largest, code, monkeypatch, capsys, repository):
    row = Row(name="all", num_tokens=1, num_cached_tokens=0, max_delta=largest, mean_delta=0)
    monkeypatch.setattr(comparison, "compare", lambda *_: iter([row]))
    monkeypatch.setattr("jaxserve.llm.LLM", lambda model, **options: shared_llm(model))
    path = str(repository / "scripts" / "parity_report")
    monkeypatch.setattr(sys, "argv", [path, f"--model={TINY}", "--tolerance=1e-5"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    assert ended.value.code == code
    assert capsys.readouterr().out.endswith(f"{'NOT all' if code else 'all'} within 1e-05\n")


@pytest.mark.parametrize("tied", [False, True])
def test_the_plain_forward_is_the_model(tmp_path, tied):
    """Against the float64 oracle, which shares no code with it; shorter texts are padded."""
    path = make_random_llama(tmp_path, {"vocab_size": 61, "tie_word_embeddings": tied})
    loaded = load_model(str(path), EngineConfig.from_options({"dtype": "float32"}))
    plain = PlainForward(loaded.config, loaded.params, 50, 32)
    for length in (2, 9, 32):
        ids = [(11 * i) % 50 for i in range(length)]
        rows = numpy_llama.log_softmax(numpy_llama.forward(path, ids)[:, :50])
        want = [rows[i - 1, ids[i]] for i in range(1, length)]
        found = plain(ids)
        assert np.isnan(found[0])
        assert found[1:] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--model=nowhere", "nowhere"),
        ("--chunk=0", "--chunk=0: must be at least 1"),
        ("--prompt_tokens=1", "--prompt_tokens=1: must be at least 2"),
        ("--tolerance=0", "--tolerance=0.0: must be above 0"),
    ],
)
def test_a_bad_flag_is_named(flag, message, monkeypatch, capsys, repository):
    path = str(repository / "scripts" / "parity_report")
    monkeypatch.setattr(sys, "argv", [path, f"--model={TINY}", flag])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
