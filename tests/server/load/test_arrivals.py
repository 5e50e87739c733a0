"""Arrivals have the rate that was asked for and gaps of the shape that was asked for."""

import numpy as np
import pytest

from jaxserve.server.load.arrivals import arrival_times


def gaps(burstiness: float, count: int = 20_001) -> np.ndarray:
    times = arrival_times(np.random.default_rng(0), count, 50.0, burstiness)
    assert times[0] == 0
    assert times[-1] == pytest.approx((count - 1) / 50)
    return np.diff(times)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_does(burstiness):
    found = gaps(burstiness)
    assert (found >= 0).all()
    # Of a gamma distribution: standard deviation / mean = 1 / sqrt(shape).
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_poisson_process_has_exponential_gaps():
    found = gaps(1.0) * 50
    for x in (0.5, 1.0, 2.0):
        assert (found > x).mean() == pytest.approx(np.exp(-x), abs=0.015)


def test_in_step_and_all_at_once():
    assert gaps(np.inf, 101) == pytest.approx(np.full(100, 1 / 50))
    assert (arrival_times(np.random.default_rng(0), 5, np.inf) == 0).all()
    assert arrival_times(np.random.default_rng(0), 1, 3.0).tolist() == [0]


def test_gaps_that_all_vanish_are_spread_out():
    times = arrival_times(np.random.default_rng(0), 3, 10.0, 1e-9)
    assert times[0] == 0
    assert times[-1] == pytest.approx(0.2)


def test_a_seed_names_the_arrivals():
    one, two, other = (arrival_times(np.random.default_rng(s), 9, 5.0) for s in (1, 1, 2))
    assert one.tolist() == two.tolist() != other.tolist()
