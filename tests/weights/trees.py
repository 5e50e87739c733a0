"""Params trees, compared."""

import numpy as np


def assert_trees_equal(found: dict, expected: dict) -> None:
    """The same keys, and the same arrays: values, shapes and dtypes."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_trees_equal(found[key], value)
        else:
            np.testing.assert_array_equal(np.asarray(found[key]), value, strict=True)
