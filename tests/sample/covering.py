"""Options of sampling, every pair of values of two of them together, and what they make of a distribution.

`distribution` is plain numpy in float64, written from docs/sampling.md, and shares nothing with the sampler.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

VALUES: dict[str, tuple] = {
    "repetition_penalty": (1.0, 1.6, 0.7),
    "frequency_penalty": (0.0, 0.8, -0.5),
    "presence_penalty": (0.0, 0.9),
    "logit_bias": (None, {1: 2.0, 4: -1.5, 7: 0.75}),
    "allowed_token_ids": (None, (0, 1, 2, 4, 5, 6, 8, 9, 11)),
    "bad_words": ((), ((2,), (0, 1))),
    "temperature": (1.0, 0.6, 1.9),
    "top_k": (0, 6, 3),
    "top_p": (1.0, 0.9, 0.55),
    "min_p": (0.0, 0.12),
}
LOGITS = np.array([2.0, 1.6, 1.1, 0.9, 0.3, 0.0, -0.2, -0.5, -1.1, -1.4, -2.0, 1.3])


def pairs_of(row: Mapping[str, object]) -> set[tuple]:
    """The pairs of values that a row has."""
    items = [(name, VALUES[name].index(value)) for name, value in row.items()]
    return set(itertools.combinations(items, 2))


def all_pairs() -> set[tuple]:
    """Every pair of values of two options."""
    found = set()
    for one, other in itertools.combinations(VALUES, 2):
        found |= {
            ((one, i), (other, j))
            for i in range(len(VALUES[one]))
            for j in range(len(VALUES[other]))
        }
    return found


def covering_rows() -> list[dict[str, object]]:
    """Each option alone, then as few rows as a greedy search finds for all pairs."""
    off = {name: values[0] for name, values in VALUES.items()}
    rows = [off]
    rows += [off | {name: value} for name, values in VALUES.items() for value in values[1:]]
    left = all_pairs().difference(*map(pairs_of, rows))
    rng = np.random.default_rng(0)
    while left:
        tries = [{name: values[rng.integers(len(values))] for name, values in VALUES.items()}]
        for _ in range(60):
            (one, i), (other, j) = sorted(left)[rng.integers(len(left))]
            row = {name: values[rng.integers(len(values))] for name, values in VALUES.items()}
            tries.append(row | {one: VALUES[one][i], other: VALUES[other][j]})
        best = max(tries, key=lambda row: len(pairs_of(row) & left))
        rows.append(best)
        left -= pairs_of(best)
    return rows


def distribution(
    logits: np.ndarray, row: Mapping, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """What the next token is drawn from, f64[V]."""
    z = logits.astype(np.float64).copy()
    for token in {*prompt, *output}:
        penalty = row["repetition_penalty"]
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    for token in set(output):
        z[token] -= row["frequency_penalty"] * list(output).count(token) + row["presence_penalty"]
    for token, bias in (row["logit_bias"] or {}).items():
        z[token] += bias
    never = set(range(len(z))) - set(row["allowed_token_ids"] or range(len(z)))
    for word in row["bad_words"]:
        begin, last = list(word[:-1]), word[-1]
        if not begin or list(output[-len(begin) :]) == begin:
            never.add(last)
    z[sorted(never)] = -np.inf
    z = z / row["temperature"]
    if row["top_k"]:
        z[z < np.sort(z)[-row["top_k"]]] = -np.inf
    probs = np.exp(z - z.max())
    probs /= probs.sum()
    mass, kept = 0.0, np.zeros(len(z), bool)
    for token in np.argsort(-probs, kind="stable"):
        if row["top_p"] < 1 and mass >= row["top_p"]:
            break
        kept[token] = True
        mass += probs[token]
    kept &= probs >= row["min_p"] * probs.max()
    probs = np.where(kept, probs, 0.0)
    return probs / probs.sum()


def chi_square(counts: np.ndarray, probs: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic over the tokens that may come, and its degrees of freedom."""
    may = probs > 0
    expected = counts.sum() * probs[may]
    return float(((counts[may] - expected) ** 2 / expected).sum()), int(may.sum()) - 1


def limit(freedom: int) -> float:
    """What a right sampler passes once in some 30,000 tries (4 standard deviations, Wilson and Hilferty)."""
    part = 2 / (9 * max(freedom, 1))
    return freedom * (1 - part + 4.0 * part**0.5) ** 3
