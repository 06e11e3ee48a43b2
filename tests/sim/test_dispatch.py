"""The way of a leg to its worker: every leg takes it, and nobody waits for anybody in it."""

from __future__ import annotations

import pytest
from setups import check_times, differences, open_loop, run

from pigou.config import ConfigError
from pigou.request import Role
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, LinkConfig, Outage, WorkerGroup
from pigou.sim.workload import RequestLengths, renewal

LONE = renewal(RequestLengths(input=(33, 33), output=(5, 5)), 1.0, 0.0, 1, 0.0, 0)
REMOTE = (WorkerGroup(role=Role.PREFILL), WorkerGroup(role=Role.DECODE))


@pytest.mark.parametrize(("workers", "legs"), [((WorkerGroup(),), 1), (REMOTE, 2)])
def test_each_leg_takes_its_way(workers: tuple[WorkerGroup, ...], legs: int) -> None:
    link = LinkConfig(gbps=0.0)
    (near,) = run(LONE, FleetConfig(workers=workers, link=link)).runs
    (far,) = run(LONE, FleetConfig(workers=workers, link=link, leg_ms=3.0)).runs
    assert far.first_token_ns - far.sent_ns == near.first_token_ns - near.sent_ns + legs * 3_000_000
    assert far.last_token_ns - far.first_token_ns == near.last_token_ns - near.first_token_ns


def test_legs_that_fail_on_their_way_go_elsewhere() -> None:
    fails = (Outage(start=0.3, end=0.5), Outage(start=0.8, end=0.9))
    workers = (WorkerGroup(role=Role.PREFILL, fails=fails), WorkerGroup(role=Role.DECODE, count=2),
               WorkerGroup(role=Role.DECODE, fails=fails))  # fmt: skip
    fleet = FleetConfig(workers=workers, leg_ms=20.0)
    client = ClientConfig(timeout=0.4, retries=3)
    workload = open_loop(rate=60.0, count=80)
    result = run(workload, fleet, client=client)
    assert sum(request.moves for request in result.runs) > 0
    for request in result.done:
        check_times(request)
    assert differences(result, run(workload, fleet, client=client, stepwise=True)) == {}


def test_a_way_takes_no_negative_time() -> None:
    with pytest.raises(ConfigError, match="leg_ms is -1"):
        FleetConfig(workers=(WorkerGroup(),), leg_ms=-1.0)
