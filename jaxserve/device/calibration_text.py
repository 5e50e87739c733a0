"""The text that KV scales are calibrated on, and its token ids for a model.

Read by `build`. The text is the project's own, short, and of many kinds: prose, a dialogue,
figures, code, other scripts. Changing a letter of it changes every calibrated scale.
"""

import numpy as np

from jaxserve.text.tokenizer import Tokenizer

TEXT = """The ferry left the island at half past six, while the lamps along the quay were still lit. \
On the upper deck a woman in a green coat counted the gulls and wrote the number down in a notebook, \
as she had done every morning for eleven years. "Forty-two," she said to nobody. "Fewer than yesterday."

How do you find the height of a tower without climbing it? Measure its shadow, and the shadow of a stick \
that you hold upright. If the stick is 1.5 m long and its shadow 2 m, a shadow of 64 m belongs to a tower \
of 48 m.

def mean(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value  # rounding is ignored here
    return total / max(len(values), 1)

User: My bread does not rise. What am I doing wrong?
Assistant: Three things are worth checking, in this order:
1. Is the yeast alive? Stir a spoonful into warm water with sugar; it should foam after ten minutes.
2. Is the room too cold? Below 18 degrees dough needs twice the time.
3. Did the salt touch the yeast before the flour did?

| year | rain (mm) | days |
| 2019 | 612 | 131 |
| 2020 | 588 | 119 |

Heute regnet es, morgen vielleicht nicht. Le train de nuit arrive à l'heure. Завтра будет дождь. \
今日は雨です。 {"status": "ok", "items": [3, 5, 8], "next": null}
"""

MAX_TOKENS = 512
NUM_DRAWN_TOKENS = 256


def calibration_ids(
    tokenizer: Tokenizer | None, *, vocab_size: int, max_position_embeddings: int
) -> list[int]:
    """The ids that a model is calibrated on, the same at every start.

    Args:
        tokenizer: the model's; None draws ids, evenly and always the same ones.
        vocab_size: V; ids of the tokenizer beyond it are left out.
        max_position_embeddings: longest context of the model in tokens.

    Returns:
        At least one id, at most MAX_TOKENS and the longest context.
    """
    ids = [] if tokenizer is None else tokenizer.encode(TEXT)
    ids = [token_id for token_id in ids if token_id < vocab_size]
    if not ids:
        ids = np.random.default_rng(0).integers(0, vocab_size, NUM_DRAWN_TOKENS).tolist()
    return ids[: min(MAX_TOKENS, max_position_embeddings)]
