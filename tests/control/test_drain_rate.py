"""What is learned of workers: how fast requests leave them, and how many streams they run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.control.admission.admission_queue import DrainRate
from pigou.control.admission.worker_capacity import FIRST_LIMIT, ConcurrencyLimit, PreemptionCaps
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


def test_a_cap_falls_with_preemptions_and_rises_while_it_is_reached() -> None:
    caps = PreemptionCaps()

    def tell(second: float, preemptions: int, streams: int) -> float | None:
        report = LoadReport("x", streams, 0, 0.95, preemptions)
        caps.report(report, streams, round(second * SECOND))
        return caps.caps.get("x")

    assert tell(0, 7, 100) is None  # what was before is nobody's
    assert tell(1, 9, 100) == 98.0
    assert tell(2, 49, 95) == 76.0  # a fifth at most
    assert tell(3, 49, 76) == 77.0
    assert tell(4, 49, 50) == 77.0  # it is not reached
    caps.report(LoadReport("x", 9, 0, 0.9), 99, 5 * SECOND)  # a report that tells none
    assert caps.caps == {"x": 77.0}
    caps.report(LoadReport("x", 9, 0, 0.45, 49), 80, 6 * SECOND)  # half of the KV is free
    assert caps.caps == {"x": 117.0}
    assert tell(66, 49, 50) is None
    assert tell(67, 50, 1) == 1.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), max_size=60))
def test_a_cap_is_at_least_a_stream_and_above_no_preemption_that_it_saw(
    reports: list[tuple[int, int]],
) -> None:
    caps, count = PreemptionCaps(), 0
    caps.report(LoadReport("x", 0, 0, 0.5, 0), 0, 0)
    for second, (more, streams) in enumerate(reports, 1):
        count += more
        caps.report(LoadReport("x", streams, 0, 0.5, count), streams, second * SECOND)
        cap = caps.caps.get("x")
        assert cap is None or cap >= 1.0
        if more:
            assert cap is not None
            assert cap <= max(1.0, streams - 1, 0.8 * streams)
