"""The way of a leg to its worker: every leg takes it, and nobody waits for anybody in it."""

from __future__ import annotations

import pytest
from setups import differences, open_loop, run

from pigou.config import ConfigError
from pigou.request import Role
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, LinkConfig, Members, Outage
from pigou.sim.workload import Lengths, renewal

LONE = renewal(Lengths(input=(33, 33), output=(5, 5)), 1.0, 0.0, 1, 0.0, 0)
REMOTE = (Members(role=Role.PREFILL), Members(role=Role.DECODE))


@pytest.mark.parametrize(("workers", "legs"), [((Members(),), 1), (REMOTE, 2)])
def test_each_leg_takes_its_way(workers: tuple[Members, ...], legs: int) -> None:
    link = LinkConfig(gbps=0.0)
    (near,) = run(LONE, FleetConfig(workers=workers, link=link)).calls
    (far,) = run(LONE, FleetConfig(workers=workers, link=link, leg_ms=3.0)).calls
    assert far.first - far.sent == near.first - near.sent + legs * 3_000_000
    assert far.last - far.first == near.last - near.first


def test_legs_that_fail_on_their_way_go_elsewhere() -> None:
    fails = (Outage(start=0.3, end=0.5), Outage(start=0.8, end=0.9))
    workers = (Members(role=Role.PREFILL, fails=fails), Members(role=Role.DECODE, count=2),
               Members(role=Role.DECODE, fails=fails))  # fmt: skip
    fleet = FleetConfig(workers=workers, leg_ms=20.0)
    client = ClientConfig(timeout=0.4, retries=3)
    workload = open_loop(rate=60.0, count=80)
    result = run(workload, fleet, client=client)
    assert sum(call.moves for call in result.calls) > 0
    for call in result.done:
        assert call.tokens == call.job.output
        assert call.intended <= call.sent <= call.first <= call.last == call.ended
    assert differences(result, run(workload, fleet, client=client, stepwise=True)) == {}


def test_a_way_takes_no_negative_time() -> None:
    with pytest.raises(ConfigError, match="leg_ms is -1"):
        FleetConfig(workers=(Members(),), leg_ms=-1.0)
