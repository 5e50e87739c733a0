"""Scales that somebody gives: what is wrong with them is said by layer."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.model.kv_scales import GivenKVScales, KVScales, check_given, largest_unit

GOOD = np.ones(3, np.float32)


def check(layers):
    return check_given(
        GivenKVScales(kv_cache_dtype="int8", layers=layers), num_layers=2, num_kv_heads=3
    )


def test_arrays_of_any_home_will_do():
    layers = [KVScales(GOOD, jnp.asarray(GOOD)), KVScales(None, GOOD)]
    assert check(layers) == layers


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (KVScales(k=GOOD[:2]), "layer 1, k: expected float32[3], found float32[2]"),
        (KVScales(v=GOOD[None]), "layer 1, v: expected float32[3], found float32[1, 3]"),
        (KVScales(v=GOOD.astype(np.float64)), "layer 1, v: expected float32[3], found float64[3]"),
        (KVScales(k=0.5), "layer 1, k: expected float32[3], found 0.5"),
        (KVScales(k=np.array([1, np.nan, 1], np.float32)), "layer 1, k: a scale must be a finite"),
        (KVScales(v=np.array([1, 1, 0], np.float32)), "got 0.0 for kv head 2"),
        (KVScales(v=np.array([1, -2, 0], np.float32)), "got -2.0 for kv head 1"),
        ((GOOD, GOOD), "layer 1 must be KVScales"),
    ],
)
def test_what_cannot_be_divided_by_is_named(bad, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check([KVScales(GOOD, GOOD), bad])


def test_one_for_every_layer():
    with pytest.raises(ConfigError, match="expected 2 layers, got 1"):
        check([KVScales(GOOD, GOOD)])


def test_largest_unit():
    assert [largest_unit(name) for name in ("int8", "float8_e4m3fn")] == [127.0, 448.0]
