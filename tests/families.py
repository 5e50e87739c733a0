"""The cases of tests/oracles/families.npz: tiny random models of every family and rope type, with the logits
and greedy tokens that transformers' own modules give (`scripts/oracles/families.py`).
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.checkpoints import make_random_model

_ORACLE = Path(__file__).parent / "oracles" / "families.npz"
NUM_PROMPT = 24  # tokens before the greedy ones


class Case(NamedTuple):
    """One model.

    Args:
        config: the object of its config.json.
        seed, initializer_range: of its weights.
        token_ids: a text.
        logits: f32[T, V] after each of its tokens.
        greedy: the tokens after its first `NUM_PROMPT`.
    """

    config: dict[str, Any]
    seed: int
    initializer_range: float
    token_ids: list[int]
    logits: np.ndarray
    greedy: list[int]

    def write(self, directory: Path, **files: Any) -> Path:
        """The checkpoint as a Hugging Face directory; `files` as in `make_random_model`."""
        return make_random_model(
            directory,
            self.config,
            seed=self.seed,
            initializer_range=self.initializer_range,
            **files,
        )


def _read() -> dict[str, Case]:
    arrays = np.load(_ORACLE)
    names = [key.removesuffix("/case") for key in arrays.files if key.endswith("/case")]
    return {
        name: Case(
            **json.loads(str(arrays[f"{name}/case"])),
            token_ids=arrays[f"{name}/token_ids"].tolist(),
            logits=arrays[f"{name}/logits"],
            greedy=arrays[f"{name}/greedy"].tolist(),
        )
        for name in names
    }


CASES = _read()
