"""Laws of the rate at which prompts come to a fleet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pigou.control.latency_model.demand import FleetRate


@given(st.floats(0.01, 5))
def test_the_rate_of_a_fleet_is_that_of_its_gaps(gap: float) -> None:
    rate = FleetRate()
    for _ in range(1000):
        rate.observe(gap)
    assert rate.per_second == pytest.approx(1 / gap, rel=0.01)


def test_a_quiet_night_counts_for_ten_seconds() -> None:
    night, rest = FleetRate(), FleetRate()
    for rate, gap in ((night, 30_000.0), (rest, 10.0)):
        rate.observe(0.01)
        rate.observe(gap)
    assert night.per_second == rest.per_second
