"""What is learned of workers: how fast requests leave them, and how many streams they run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.control.admission.admission_queue import DrainRate
from pigou.control.admission.worker_capacity import FIRST_LIMIT, ConcurrencyLimit
from pigou.control.messages import LoadReport
from pigou.request import SECOND


def test_the_streams_of_a_worker_that_does_not_say_its_limit_are_learned() -> None:
    bound, said, names = ConcurrencyLimit(), np.array([0, 7]), ("x", "y")
    assert bound.of(said, names).tolist() == [FIRST_LIMIT, 7]
    bound.report(LoadReport("x", 32, 0, 0.1), 32, 0)
    bound.report(LoadReport("x", 32, 0, 0.1), 32, SECOND // 50)  # of the same change
    assert bound.of(said, names).tolist() == [2 * FIRST_LIMIT, 7]
    bound.report(LoadReport("x", 40, 24, 0.9), 64, SECOND)
    assert bound.of(said, names).tolist() == [44, 7]
    for second in range(2, 12):
        bound.report(LoadReport("x", 40, 3, 0.9), 44, second * SECOND)
    assert bound.of(said, names).tolist() == [40, 7]
    bound.report(LoadReport("x", 20, 0, 0.9), 20, 12 * SECOND)
    assert bound.of(said, names).tolist() == [40, 7]


@given(st.floats(0.5, 50.0), st.integers(2, 200), st.integers(0, 2**32 - 1))
def test_the_drain_rate_is_that_of_regular_ends_however_they_jitter(
    rate: float, count: int, seed: int
) -> None:
    drain, generator = DrainRate(), np.random.default_rng(seed)
    now = 0
    for number in range(count):
        now = int((number + generator.uniform(0, 0.3)) / rate * SECOND)
        drain.ended(now, 10)
    requests, tokens = drain.rates(now)
    assert requests == pytest.approx(rate, rel=0.5 if count < 20 else 0.05)
    assert tokens == pytest.approx(10 * requests)


def test_one_long_pause_does_not_bend_the_drain_rate_and_silence_lowers_it() -> None:
    drain = DrainRate()
    for number in range(64):
        drain.ended(number * SECOND // 10 + (number > 50) * 30 * SECOND)
    last = 63 * SECOND // 10 + 30 * SECOND
    assert drain.rates(last)[0] == pytest.approx(10.0, rel=0.05)
    assert drain.rates(last + 30 * SECOND)[0] == pytest.approx(0.1, rel=0.05)
    assert drain.retry_after(100, 0, last) == pytest.approx(10 * SECOND, rel=0.05)
    assert drain.retry_after(1, 0, last) == SECOND
    assert drain.retry_after(10**6, 0, last) == 60 * SECOND
    assert DrainRate().retry_after(10, 10, 0) == SECOND
