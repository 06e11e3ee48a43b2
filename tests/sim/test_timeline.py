"""Laws of timelines: they change nothing, stay small, and say what was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from setups import closed_loop, differences, open_loop, simulation

from pigou.request import SECOND, Role
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, LinkConfig, Outage, Signals, Slow, WorkerGroup
from pigou.sim.timeline import Timeline

TROUBLED = FleetConfig(
    workers=(
        WorkerGroup(role=Role.PREFILL, slow=(Slow(factor=2.5, start=0.4, end=1.3),)),
        WorkerGroup(role=Role.DECODE, count=2, fails=(Outage(start=0.7, end=1.1),)),
        WorkerGroup(role=Role.DECODE, starts=0.5),
    ),
    link=LinkConfig(gbps=0.5),
    signals=Signals(event_delay_ms=30.0, event_loss=0.2, report_every_ms=100.0),
    detect_ms=150.0,
)


@pytest.mark.parametrize("policy", ["toll", "least-loaded"])
@pytest.mark.parametrize("fleet", ["2xboth", "1p+2d", TROUBLED])
def test_a_run_that_is_watched_has_the_same_results(fleet: Any, policy: str) -> None:
    def made() -> Any:
        return simulation(
            open_loop(60.0, 150), fleet, control={"policy": policy, "max_inflight": 6},
            client=ClientConfig(pool=16, timeout=2.0, retries=1), setup={"blocks": 60},
        )  # fmt: skip

    plain, watched = made(), made()
    Timeline(watched, period=SECOND // 500, max_samples=32)
    one, other = plain.run(), watched.run()
    assert differences(one, other) == {}
    assert [request.last_token_ns for request in one.runs] == [
        request.last_token_ns for request in other.runs
    ]


def test_samples_are_few_and_even_however_long_the_run() -> None:
    made = simulation(closed_loop(4, 60.0))
    timeline = Timeline(made, period=SECOND // 100, max_samples=16)
    made.run()
    times = timeline.times
    assert 8 <= len(times) <= 16
    assert times[0] == 0.0
    np.testing.assert_allclose(np.diff(times), timeline.period / SECOND)
    assert times[-1] + timeline.period / SECOND >= made.clock.now / SECOND - 1.0


def test_every_open_call_is_somewhere() -> None:
    made = simulation(
        closed_loop(24, 4.0), "2xboth", client=ClientConfig(pool=12),
        control={"max_inflight": 3},
    )  # fmt: skip
    timeline = Timeline(made)
    made.run()
    middle = (timeline.times > 0.5) & (timeline.times < 3.5)
    where = sum(timeline.fleet(name)[middle] for name in ("client", "queued", "running", "waiting"))
    assert (timeline.fleet("client")[middle] == 12).all()
    assert (timeline.fleet("queued")[middle] > 0).all()
    # What reaches a worker during a step is counted from the next one on.
    assert ((where >= 24 - 6) & (where <= 24)).all()
    assert np.median(where) == 24
    assert timeline.workers == ("both-0", "both-1")


def test_a_dead_worker_has_no_load() -> None:
    fleet = FleetConfig(workers=(WorkerGroup(), WorkerGroup(fails=(Outage(start=1.0, end=2.0),))))
    made = simulation(closed_loop(8, 3.0), fleet)
    timeline = Timeline(made)
    made.run()
    running = timeline.worker("running")[:, 1]
    dead = (timeline.times >= 1.0) & (timeline.times < 2.0)
    assert np.isnan(running[dead]).all()
    assert (running[~dead][1:-1] >= 0).all()


@pytest.mark.parametrize(("period", "most"), [(0, 2), (1, 0), (1, 3)])
def test_samples_without_sense_are_refused(period: int, most: int) -> None:
    with pytest.raises(ValueError, match=f"period {period} and most {most}"):
        Timeline(simulation(open_loop()), period=period, max_samples=most)
