"""Draws under every option, and under every pair of values of two, follow the distribution that
docs/sampling.md says: chi-square over 20,000 draws of each, by the programs' own functions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.constraints.constraint import clear_ids, ids_mask
from jaxserve.sample.processors import BiasRows, PenaltyRows, SamplingRows, process
from jaxserve.sample.sampler import sample
from tests.sample.covering import (
    LOGITS,
    VALUES,
    all_pairs,
    chi_square,
    covering_rows,
    distribution,
    limit,
    pairs_of,
)

NUM_DRAWS = 20_000
V = len(LOGITS)
PROMPT, OUTPUT = [1, 3, 9], [0, 4, 4, 0]
ROWS = covering_rows()
PROCESS, SAMPLE = jax.jit(process), jax.jit(sample)


def drawn(row: dict, seed: int) -> np.ndarray:
    """How often each token is drawn."""
    counts = np.zeros((1, V), np.int32)
    counts[0, PROMPT] = 1
    np.add.at(counts[0], OUTPUT, 2)
    allowed = row["allowed_token_ids"] or range(V)
    masks = ids_mask(1, V)[None].copy()
    clear_ids(masks[0], set(range(V)) - set(allowed))
    clear_ids(masks[0], [w[-1] for w in row["bad_words"] if len(w) == 1 or OUTPUT[-1] == w[0]])
    ids, values = np.zeros((1, 4), np.int32), np.zeros((1, 4), np.float32)
    for place, (token, bias) in enumerate((row["logit_bias"] or {}).items()):
        ids[0, place], values[0, place] = token, bias
    penalties = [row[f"{name}_penalty"] for name in ("repetition", "frequency", "presence")]
    columns = [jnp.full(1, value, jnp.float32) for value in penalties]
    processed = PROCESS(
        LOGITS[None].astype(np.float32),
        counts,
        PenaltyRows(jnp.zeros(1, jnp.int32), *columns),
        BiasRows(jnp.asarray(ids), jnp.asarray(values)),
        masks,
    )
    seeds = np.stack([np.full(NUM_DRAWS, seed), np.arange(NUM_DRAWS)], axis=1).astype(np.uint32)
    rows = SamplingRows(
        jnp.full(NUM_DRAWS, row["temperature"], jnp.float32),
        jnp.full(NUM_DRAWS, row["top_k"], jnp.int32),
        jnp.full(NUM_DRAWS, row["top_p"], jnp.float32),
        jnp.full(NUM_DRAWS, row["min_p"], jnp.float32),
        jnp.asarray(seeds),
        jnp.full(NUM_DRAWS, len(OUTPUT), jnp.int32),
        jnp.zeros(NUM_DRAWS, jnp.bool_),
        jnp.zeros(NUM_DRAWS, jnp.bool_),
    )
    tokens = SAMPLE(jnp.broadcast_to(processed, (NUM_DRAWS, V)), rows)
    return np.bincount(np.asarray(tokens), minlength=V)


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_draws_follow_the_exact_distribution(number):
    row = ROWS[number]
    counts, probs = drawn(row, number), distribution(LOGITS, row, PROMPT, OUTPUT)
    assert not counts[probs == 0].any(), row
    found, freedom = chi_square(counts, probs)
    assert found <= limit(freedom), (row, counts, probs)


def test_every_value_stands_alone_and_every_pair_together():
    assert set().union(*map(pairs_of, ROWS)) == all_pairs()
    off = {name: values[0] for name, values in VALUES.items()}
    alone = [{n for n in row if row[n] != off[n]} for row in ROWS]
    assert {next(iter(names)) for names in alone if len(names) == 1} == set(VALUES)
    assert len(ROWS) < 40


def test_the_test_tells_distributions_apart():
    """The control: draws of one row are not those of another that differs in one option."""
    off = ROWS[0]
    counts = drawn(off, 0)
    for name, value in (("frequency_penalty", 0.1), ("temperature", 1.06), ("top_p", 0.99)):
        probs = distribution(LOGITS, off | {name: value}, PROMPT, OUTPUT)
        found, freedom = chi_square(counts, probs)
        assert found > limit(freedom) or counts[probs == 0].any(), name
