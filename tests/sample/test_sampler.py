"""The sampler: what each filter keeps, and that rows and branches do not touch each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sample.filters import keep_mask
from jaxserve.sample.logprobs import chosen_logprobs
from jaxserve.sample.processors import SamplingRows
from jaxserve.sample.sampler import sample

SAMPLE = jax.jit(sample)
KEEP = jax.jit(keep_mask)
PROBS = np.array([0.4, 0.3, 0.15, 0.1, 0.05])


def rows(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0) -> SamplingRows:
    def column(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (n,)))

    seeds = np.zeros((n, 2), np.uint32)
    seeds[:, 1] = seed
    return SamplingRows(
        column(temperature, np.float32),
        column(top_k, np.int32),
        column(top_p, np.float32),
        column(min_p, np.float32),
        jnp.asarray(seeds),
        column(position, np.int32),
        column(True, np.bool_),
        column(False, np.bool_),
    )


def kept(top_k=0, top_p=1.0, min_p=0.0, probs=PROBS) -> list[int]:
    logits = jnp.log(jnp.asarray(probs[None], jnp.float32))
    r = rows(1, top_k=top_k, top_p=top_p, min_p=min_p)
    return np.flatnonzero(np.asarray(KEEP(logits, r.top_k, r.top_p, r.min_p))[0]).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 1}, [0]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.65}, [0, 1]),
        ({"top_p": 0.75}, [0, 1, 2]),
        ({"top_p": 0.4}, [0]),
        ({"top_p": 1e-6}, [0]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"min_p": 1.0}, [0]),
        (
            {"top_k": 3, "top_p": 0.7},
            [0, 1],
        ),  # top_p of what top_k left: 0.4 / 0.85 < 0.7 <= 0.7 / 0.85
        ({"top_k": 4, "min_p": 0.3}, [0, 1, 2]),
    ],
)
def test_what_the_filters_keep(options, expected):
    assert kept(**options) == expected


def test_filters_keep_the_same_in_any_vocabulary_order():
    order = np.array([3, 0, 4, 2, 1])
    assert sorted(order[kept(top_k=3, top_p=0.7, probs=PROBS[order])].tolist()) == [0, 1]


def sorted_mask(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """What top_k and then top_p keep of one row, in float64 and by a full sort."""
    descending = -np.sort(-logits.astype(np.float64))
    count = min(top_k, len(logits)) or len(logits)
    probs = np.exp(descending[:count])
    mass = np.cumsum(probs) / probs.sum()
    num_kept = count if top_p == 1 else 1 + int(np.count_nonzero(mass[:-1] < top_p))
    return logits >= descending[num_kept - 1]


def test_a_search_keeps_what_a_sort_would_with_ties_and_without():
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(48, 997)) * rng.choice([0.1, 1, 30], (48, 1))).astype(np.float32)
    logits[::2] = np.round(2 * logits[::2]) / 2
    logits -= logits.max(axis=1, keepdims=True)
    top_k = rng.choice([0, 1, 5, 40, 997, 1100], 48).astype(np.int32)
    top_p = rng.choice([1, 0.1, 0.5, 0.9, 1e-6], 48).astype(np.float32)
    found = np.asarray(KEEP(logits, top_k, top_p, np.zeros(48, np.float32)))
    for row, mask in enumerate(found):
        expected = sorted_mask(logits[row], int(top_k[row]), float(top_p[row]))
        assert np.array_equal(mask, expected), (row, top_k[row], top_p[row])
    assert len(set(found.sum(axis=1).tolist())) > 10  # a mask of all or of one would not do


def test_equals_go_to_the_lowest_id_and_nan_to_one_of_the_vocabulary():
    logits = jnp.array([[1.0, 3.0, 3.0], [jnp.nan] * 3, [0.0, jnp.nan, jnp.inf]])
    assert int(SAMPLE(logits, rows(3, temperature=0.0))[0]) == 1
    for temperature in (0.0, 1.0):
        ids = np.asarray(SAMPLE(logits, rows(3, temperature=temperature, top_p=0.5, top_k=2)))
        assert ((ids >= 0) & (ids < 3)).all()


def test_draws_follow_the_probabilities():
    n = 20_000
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(PROBS, jnp.float32)), (n, 5))
    r = rows(n, seed=np.arange(n))
    for options, expected in (
        ({}, PROBS),
        ({"temperature": 2.0}, np.sqrt(PROBS) / np.sqrt(PROBS).sum()),
        ({"top_k": 2}, np.array([4 / 7, 3 / 7, 0, 0, 0])),
    ):
        changed = rows(n, seed=np.arange(n), **options) if options else r
        drawn = np.bincount(np.asarray(SAMPLE(logits, changed)), minlength=5) / n
        assert np.abs(drawn - expected).max() < 0.015  # 4 standard deviations


def test_c17_a_row_depends_on_its_own_seed_and_position_alone():
    """Slot, neighbours, and the branches they make the batch take do not matter."""
    logits = jax.random.normal(jax.random.key(0), (1, 64))
    alone = int(SAMPLE(logits, rows(1, temperature=0.8, seed=42, position=3))[0])
    noise = jax.random.normal(jax.random.key(1), (4, 64))
    for slot in range(4):
        for neighbour in ({"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.0}, {"min_p": 0.5}):
            seed, position, temperature = np.full(4, 7), np.full(4, 1), np.full(4, 1.0)
            seed[slot], position[slot], temperature[slot] = 42, 3, 0.8
            fields = {"top_k": np.zeros(4), "top_p": np.ones(4), "min_p": np.zeros(4)}
            for name, value in neighbour.items():
                if name == "temperature":
                    temperature = np.where(np.arange(4) == slot, 0.8, value)
                else:
                    fields[name] = np.where(np.arange(4) == slot, fields[name], value)
            r = rows(4, temperature=temperature, seed=seed, position=position, **fields)
            mixed = noise.at[slot].set(logits[0])
            assert int(SAMPLE(mixed, r)[slot]) == alone
    others = {
        int(SAMPLE(logits, rows(1, temperature=0.8, seed=s, position=p))[0])
        for s, p in ((42, 4), (43, 3), (1, 3), (2, 3), (42, 5))
    }
    assert others != {alone}


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-10, 1e-4])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.1}, {"min_p": 1.0}, {"top_k": 1}])
def test_c20_small_temperatures_give_the_argmax(temperature, options):
    logits = jnp.array([[0.0, 78.0, 80.0], [3.0, 2.0, 1.0]], jnp.float32)
    fields = {k: np.array([v, 1.0 if k == "top_p" else 0]) for k, v in options.items()}
    r = rows(2, temperature=np.array([temperature, 1.0]), **fields)
    for position in range(8):
        ids = SAMPLE(logits, r._replace(output_positions=jnp.full(2, position, jnp.int32)))
        assert int(ids[0]) == 2
        assert np.isfinite(np.asarray(chosen_logprobs(logits, ids))).all()


def test_logprobs_are_of_the_raw_logits():
    logits = jnp.log(jnp.asarray(PROBS[None], jnp.float32)) + 7
    got = chosen_logprobs(logits, jnp.array([3], jnp.int32))
    assert abs(float(got[0]) - np.log(0.1)) < 1e-5
