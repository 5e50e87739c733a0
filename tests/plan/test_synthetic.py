"""Generated workloads: what they are distributed like, and that a seed names one."""

import numpy as np
import pytest

from jaxserve.plan.synthetic import (
    exponential_lengths,
    log_normal_lengths,
    make_trace,
    poisson_arrivals,
)


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_lengths_have_their_mean_and_stay_in_range():
    exponential = exponential_lengths(rng(), 20_000, 128, longest=4096)
    assert exponential.mean() == pytest.approx(128.5, rel=0.03)
    assert exponential.std() == pytest.approx(128, rel=0.05)
    log_normal = log_normal_lengths(rng(), 20_000, 340, sigma=0.8, longest=8192)
    assert log_normal.mean() == pytest.approx(340.5, rel=0.03)
    cut = exponential_lengths(rng(), 1000, 128, longest=100)
    assert (cut.min() >= 1, cut.max()) == (True, 100)


def test_arrivals_have_their_rate():
    arrivals = poisson_arrivals(rng(), 20_000, 5.0)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)


def test_a_trace_is_put_in_order_of_arrival_and_shares_nothing():
    trace = make_trace(
        "t", prompt_lengths=[3, 5, 4], output_lengths=[1, 2, 3], arrivals_s=[2.0, 0.5, 2.0]
    )
    found = [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in trace.requests]
    assert found == [(0.5, 5, 2), (2.0, 3, 1), (2.0, 4, 3)]
    prompts = [r.prompt_token_ids() for r in trace.requests]
    assert len({ids[0] for ids in prompts}) == 3
    assert not trace.has_blocks


def test_a_seed_names_a_workload():
    one, two = (exponential_lengths(rng(), 9, 50, longest=99) for _ in range(2))
    assert (one == two).all()
    other = exponential_lengths(np.random.default_rng(8), 9, 50, longest=99)
    assert (one != other).any()
