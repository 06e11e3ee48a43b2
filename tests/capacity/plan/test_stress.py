"""The pace of a workload's bursts."""

from __future__ import annotations

import pytest

from pigou.capacity.plan.demand import describe
from pigou.capacity.plan.plan import burst_rps
from pigou.request import SECOND
from pigou.sim.workload import OpenLoop, RequestSession, RequestSpec


def test_a_burst_goes_at_a_pace_that_one_stretch_in_a_hundred_exceeds() -> None:
    starts = [*range(0, 2000), *(2000 + 0.1 * i for i in range(200)), *range(2020, 4000)]
    loop = OpenLoop(
        tuple(RequestSession(round(at * SECOND), (RequestSpec(10, 5),)) for at in starts)
    )
    demand = describe(loop, known_rate=True)
    assert burst_rps(demand, demand.rate_rps) == pytest.approx(10.0, rel=0.01)
    assert burst_rps(demand, 2.0 * demand.rate_rps) == pytest.approx(20.0, rel=0.01)
    even = describe(OpenLoop(loop.sessions[:2000]), known_rate=True)
    assert burst_rps(even, 1.0) == pytest.approx(1.0, rel=0.01)
