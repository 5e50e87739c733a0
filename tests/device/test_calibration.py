"""Calibration of an 8-bit KV cache: the right head of the right layer, always the same, never nonsense."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.device import calibration
from jaxserve.device.calibration import MARGINS, find_kv_scales, scales_of
from jaxserve.device.calibration_text import MAX_TOKENS, calibration_ids
from jaxserve.errors import ConfigError
from jaxserve.model.kv_scales import GivenKVScales, KVScales
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights.hf_directory import write_hf_directory
from jaxserve.weights.loader import load_params, open_checkpoint
from tests.checkpoints import make_random_llama
from tests.families import CASES
from tests.llms import TINY

IDS = np.random.default_rng(2).integers(0, 96, 70).tolist()
UNITS = {"int8": 127.0, "fp8_e4m3": 448.0}


def scales(
    path, kv_cache_dtype="int8", *, given=None, ids=IDS, layers_per_program=2, dtype="float32"
):
    """[L][k, v] f32[K] as calibration finds them."""
    params, config = load_params(open_checkpoint(path), jnp.dtype(dtype))
    found = find_kv_scales(
        kv_cache_dtype,
        given=given,
        config=config,
        params=jax.device_put(params),
        dtype=jnp.dtype(dtype),
        token_ids=ids,
        layers_per_program=layers_per_program,
    )
    for scale in jax.tree.leaves(found):
        assert (scale.shape, scale.dtype) == ((config.num_kv_heads,), jnp.float32)
    return np.array([[np.asarray(one) for one in layer] for layer in found])  # [L, 2, K]


@pytest.fixture
def edited(tmp_path):
    """A random Llama (2 layers, 3 kv heads of 16) after an edit of its tensors."""

    def write(edit=lambda tensors: None):
        path = make_random_llama(tmp_path / "plain")
        tensors = load_file(path / "model.safetensors")
        edit(tensors)
        write_hf_directory(
            tmp_path / "edited", json.loads((path / "config.json").read_text()), tensors
        )
        return tmp_path / "edited"

    return write


def projection(layer: int, part: str) -> str:
    return f"model.layers.{layer}.self_attn.{part}_proj.weight"


@pytest.mark.parametrize("part", ["k", "v"])
def test_c35_a_head_that_reaches_further_has_its_own_scale(edited, part):
    """Only the last layer is changed, so that nothing else may move."""
    before = scales(edited())

    def stretch(tensors):
        tensors[projection(1, part)][16:32] *= 1000  # kv head 1

    after = scales(edited(stretch))
    expected = before.copy()
    expected[1, "kv".index(part), 1] *= 1000
    np.testing.assert_allclose(after, expected, rtol=1e-6)


def test_the_largest_value_of_the_text_is_the_margin_away_from_the_limit(edited):
    """Values are not rotated: the first layer's follow from the tensors alone."""
    path = edited()
    tensors = load_file(path / "model.safetensors")
    x = tensors["model.embed_tokens.weight"][IDS].astype(np.float64)
    x /= np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    values = x * tensors["model.layers.0.input_layernorm.weight"] @ tensors[projection(0, "v")].T
    tops = np.abs(values).reshape(len(IDS), 3, 16).max((0, 2))
    for name, unit in UNITS.items():
        np.testing.assert_allclose(scales(path, name)[0, 1], MARGINS[name] * tops / unit, rtol=1e-5)
        assert MARGINS[name] > 1


def test_nothing_but_model_and_text_moves_a_scale(edited):
    path = edited()
    first = scales(path)
    np.testing.assert_array_equal(scales(path), first)
    np.testing.assert_allclose(scales(path, layers_per_program=1), first, rtol=1e-6)
    assert np.abs(scales(path, ids=IDS[::-1]) - first).max() > 1e-4  # the control
    assert np.isfinite(scales(path, ids=IDS[:1])).all()


def test_layers_that_differ_are_run_as_what_they_are(tmp_path):
    path = CASES["smollm3_window"].write(tmp_path)
    first = scales(path, layers_per_program=4)
    np.testing.assert_allclose(scales(path, layers_per_program=1), first, rtol=1e-5)


def test_calibration_in_bfloat16_is_near_float32(edited):
    path = edited()
    np.testing.assert_allclose(scales(path, dtype="bfloat16"), scales(path), rtol=0.05)


def test_c35_a_head_of_zeros_has_a_scale_that_can_be_divided_by(edited):
    def zero(tensors):
        tensors[projection(0, "k")][:16] = 0
        tensors[projection(1, "v")][32:] = 0

    for name, unit in UNITS.items():
        found = scales(edited(zero), name)
        assert found[0, 0, 0] == found[1, 1, 2] == np.float32(1 / unit)
        assert (found > 0).all()
    tiny = scales_of(np.array([1e-43, 1e-37, 3e38]), "int8")
    assert tiny[0] == np.float32(1 / 127)  # a subnormal scale would be flushed to 0
    assert np.isfinite(tiny).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_c35_weights_that_are_not_finite_are_said_and_not_served(edited, bad):
    def spoil(tensors):
        tensors[projection(1, "v")][17] = bad  # kv head 1

    with pytest.raises(
        ConfigError, match="kv_cache_dtype=int8: layer 1, kv head 1: values are NaN"
    ):
        scales(edited(spoil))


def test_c35_layers_without_given_scales_are_calibrated(edited, caplog):
    path = edited()
    calibrated = scales(path, "fp8_e4m3")
    own = np.array([1.0, 2.0, 3.0], np.float32)
    given = GivenKVScales(
        kv_cache_dtype="fp8_e4m3", layers=[KVScales(k=own), KVScales(k=own, v=2 * own)]
    )
    with caplog.at_level(logging.INFO, "jaxserve"):
        found = scales(path, "fp8_e4m3", given=given)
    np.testing.assert_array_equal(found[0, 0], own)
    np.testing.assert_array_equal(found[0, 1], calibrated[0, 1])
    np.testing.assert_array_equal(found[1], [own, 2 * own])
    assert "KV scales of fp8_e4m3: 3 came with the model, 1 calibrated on 70 tokens" in caplog.text


def test_where_nothing_is_missing_nothing_runs(edited, monkeypatch):
    one = np.ones(3, np.float32)
    given = GivenKVScales(kv_cache_dtype="int8", layers=[KVScales(one, one)] * 2)
    monkeypatch.setattr(calibration, "largest_magnitudes", None)
    assert (scales(edited(), given=given) == 1).all()


def test_calibration_ids():
    tokenizer = Tokenizer.from_directory(TINY)
    ids = calibration_ids(tokenizer, vocab_size=512, max_position_embeddings=2048)
    assert 200 <= len(ids) <= MAX_TOKENS
    assert ids == calibration_ids(tokenizer, vocab_size=512, max_position_embeddings=2048)
    assert len(calibration_ids(tokenizer, vocab_size=512, max_position_embeddings=40)) == 40
    assert max(calibration_ids(tokenizer, vocab_size=100, max_position_embeddings=2048)) < 100
    drawn = calibration_ids(None, vocab_size=512, max_position_embeddings=2048)
    assert drawn == calibration_ids(None, vocab_size=512, max_position_embeddings=2048)
    assert len(set(drawn)) > 100
    assert 0 <= min(drawn) <= max(drawn) < 512


def test_scales_of_another_type_are_named():
    with pytest.raises(ConfigError, match="kv_scales must be GivenKVScales or None, got"):
        find_kv_scales(
            "int8",
            given={"k": 1.0},  # type: ignore[arg-type]
            config=None,  # type: ignore[arg-type]
            params={},
            dtype=np.dtype("float32"),
            token_ids=[1],
            layers_per_program=1,
        )
