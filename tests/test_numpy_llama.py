"""The oracle against transformers: without this the other tests would compare two guesses."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests import checkpoints, numpy_llama

ORACLE = Path(__file__).parent / "oracles" / "llama_logits.npz"


def oracle_cases() -> list[str]:
    with np.load(ORACLE) as arrays:
        return [key.removesuffix("/case") for key in arrays.files if key.endswith("/case")]


@pytest.mark.parametrize("name", oracle_cases())
def test_c32_logits_equal_transformers(name, tmp_path):
    with np.load(ORACLE) as arrays:
        case = json.loads(str(arrays[f"{name}/case"]))
        token_ids, expected = arrays[f"{name}/token_ids"].tolist(), arrays[f"{name}/logits"]
    checkpoints.make_random_llama(tmp_path, **case)
    logits = numpy_llama.forward(tmp_path, token_ids)
    np.testing.assert_allclose(logits[::4], expected, rtol=0, atol=2e-5)
    # The comparison can fail: swapping two early tokens shows in the last row.
    swapped = numpy_llama.forward(tmp_path, [token_ids[1], token_ids[0], *token_ids[2:]])
    assert np.abs(swapped[::4][-1] - expected[-1]).max() > 1e-3


def test_bigram_logits_are_what_was_asked_for(tmp_path):
    rng = np.random.default_rng(0)
    dense = rng.standard_normal(50).astype(np.float32)
    checkpoints.make_bigram(
        tmp_path, {3: {7: 5.0, 9: -1.5}, 4: dense}, vocab_size=50, default={11: math.log(0.25)}
    )
    logits = numpy_llama.forward(tmp_path, [3, 20, 4, 3, 33])
    for row in (0, 3):
        expected = np.zeros(50)
        expected[[7, 9]] = 5.0, -1.5
        np.testing.assert_allclose(logits[row], expected, atol=1e-5)
    np.testing.assert_allclose(logits[2], dense, atol=1e-5)
    for row in (1, 4):
        np.testing.assert_allclose(logits[row], np.eye(50)[11] * math.log(0.25), atol=1e-5)


def test_script_says_its_text_once_and_ends(tmp_path):
    checkpoints.make_script(tmp_path, [5, 9, 2, 30], vocab_size=40, end_id=1)
    ids, logprobs = numpy_llama.greedy(tmp_path, [17, 18], max_tokens=10, end_ids=[1])
    assert ids == [5, 9, 2, 30, 1]
    assert min(logprobs) > -1e-6


def test_greedy_stops_at_max_tokens(tmp_path):
    checkpoints.make_script(tmp_path, [5, 9, 2, 30], vocab_size=40, first_after=[2])
    assert numpy_llama.greedy(tmp_path, [3], max_tokens=3)[0] == [5, 9, 2]
