"""Renewal processes: mean, variation, order and limits of their arrival times."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.request import SECOND
from pigou.sim.arrival_rate import renewal_times


def gaps(rate: float, cv: float, seed: int, count: int) -> np.ndarray:
    times = islice(renewal_times(rate, cv, np.random.default_rng(seed)), count)
    return np.diff(np.array([0, *times])) / SECOND


@settings(max_examples=examples(30))
@given(rate=st.floats(0.1, 1000), cv=st.floats(0.2, 2), seed=st.integers(0, 2**32))
def test_gaps_have_the_mean_and_the_variation_that_were_asked(
    rate: float, cv: float, seed: int
) -> None:
    count = 20_000
    seen = gaps(rate, cv, seed, count)
    # Six standard errors of the mean; that of the CV is about (cv + cv^3) / sqrt(count) for Gamma.
    assert abs(seen.mean() * rate - 1) < 6 * cv / count**0.5
    assert abs(seen.std() / seen.mean() - cv) < 6 * (cv + cv**3) / count**0.5 + 1e-3


def test_a_cv_of_one_is_exponential() -> None:
    seen = np.sort(gaps(5.0, 1.0, 7, 20_000))
    law = 1 - np.exp(-5.0 * seen)
    # Kolmogorov-Smirnov distance; 1.95 / sqrt(n) is exceeded once in a thousand samples.
    assert np.abs(law - (np.arange(20_000) + 0.5) / 20_000).max() < 1.95 / 20_000**0.5


def test_a_cv_of_zero_is_a_metronome() -> None:
    assert list(islice(renewal_times(4.0, 0.0, np.random.default_rng(0)), 3)) == [
        SECOND // 4,
        SECOND // 2,
        3 * SECOND // 4,
    ]


def test_times_never_fall_and_repeat_with_the_seed() -> None:
    one, two = (
        list(islice(renewal_times(9.0, 1.5, np.random.default_rng(3)), 5000)) for _ in range(2)
    )
    assert one == two
    assert all(a <= b for a, b in pairwise(one))
    assert all(type(time) is int for time in one[:10])


@pytest.mark.parametrize(
    ("rate", "cv"),
    [(0, 1), (-1, 1), (float("nan"), 1), (1, -0.1), (1, 1e200), (1, 1e-200), (1, float("nan"))],
)
def test_a_rate_or_variation_out_of_range_is_refused(rate: float, cv: float) -> None:
    with pytest.raises(ValueError, match="it must be"):
        renewal_times(rate, cv, np.random.default_rng(0))
