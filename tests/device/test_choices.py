"""How many layers make a program."""

import pytest

from jaxserve.device.choices import layers_per_program
from jaxserve.model_config import LayerKind

FULL, SLIDING, UNTURNED = LayerKind(), LayerKind(window=8), LayerKind(has_rope=False)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([FULL] * 30, 3),
        ([FULL] * 32, 4),
        ([FULL] * 31, 1),
        ([FULL, FULL, FULL, UNTURNED] * 9, 4),  # one program
        ([FULL] * 14 + [SLIDING] * 14, 2),  # two; four layers at a time would make three
        ([FULL] * 16 + [SLIDING] * 16, 4),
        ([FULL] * 21 + [SLIDING] * 7, 1),  # so would two layers
    ],
)
def test_as_many_layers_as_make_the_fewest_programs(kinds, expected):
    assert layers_per_program(kinds) == expected
