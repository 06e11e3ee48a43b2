"""Laws of a simulated fleet all of whose workers die, and come back one after another."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.sim.setups import FleetConfig, Outage, WorkerGroup, simulation

from pigou.sim.workload import RequestLengths, renewal

#: Every worker takes these long streams for as long as the test lasts.
SETUP = {"blocks": 9000, "max_seqs": 256, "max_batched_tokens": 2048}


def outage(*back: float) -> FleetConfig:
    workers = [WorkerGroup(fails=(Outage(start=0.01, end=end),)) for end in back]
    return FleetConfig(workers=tuple(workers), detect_ms=1.0)


@pytest.mark.parametrize("back", [(2.0, 4.0, 6.0), (12.0, 3.0, 25.0), (2.0, 2.0, 2.0)])
def test_the_queue_is_shared_by_all_that_come_back(back: tuple[float, ...]) -> None:
    load = renewal(RequestLengths(input=(64, 64), output=(1500, 1500)), 400.0, 0.0, 120, 0.0, 1)
    result = simulation(load, outage(*back), setup=SETUP).run()
    done = result.done
    assert len(done) == 120
    assert max(Counter(request.decode_worker for request in done).values()) <= 48
    assert min(Counter(request.decode_worker for request in done).values()) >= 32


def test_one_that_stays_away_holds_nobody_up_for_good() -> None:
    load = renewal(RequestLengths(input=(64, 64), output=(100, 100)), 400.0, 0.0, 60, 0.0, 1)
    result = simulation(load, outage(2.0, 3.0, 10_000.0), setup=SETUP).run()
    assert len(result.done) == 60
    assert (
        max(request.ended_ns for request in result.done) < result.done[0].intended_ns + 60 * 10**9
    )
