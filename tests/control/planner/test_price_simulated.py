"""The price planner on a simulated fleet, with the production scheduler below."""

from __future__ import annotations

from typing import Any

import pytest

from pigou.config import ControlConfig
from pigou.sim.arrival_rate import RateSchedule
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import ScalingConfig, read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.workload import RequestLengths, renewal

LAW = "law:itl_a=0.008,itl_b=0.0003,prefill=0.005,prefill_token=0.00006"


def run(planner: str, fleet: str, rates: tuple[float, ...], hold: float) -> dict[str, Any]:
    """Return the figures of a run with steps of the rate every `hold` seconds."""
    schedule = RateSchedule(seconds=tuple(hold * n for n in range(len(rates))), rates=rates)
    lengths = RequestLengths(input=(1000, 3000), output=(50, 150))
    made = Simulation(
        renewal(lengths, schedule, 1.0, 0, hold * len(rates), 1),
        read_fleet(fleet),
        Setup(timing=LAW, blocks=20_000),
        ControlConfig(max_inflight=UNLIMITED, max_inflight_tokens=UNLIMITED,
                      queue_timeout=UNLIMITED, max_queued=UNLIMITED),
        ClientConfig(), seed=0,
        scaling=ScalingConfig(
            slo="ttft=0.5,itl=0.025", planner={"planner": planner}, max_workers=12, start_up=15.0
        ),
    )  # fmt: skip
    document: dict[str, Any] = made.run().document()
    return document


@pytest.mark.parametrize("fleet", ["1p+1d", "1xboth"])
def test_a_step_is_served_and_given_back(fleet: str) -> None:
    figures = run("price", fleet, (3.0, 10.0, 2.0), 90.0)
    planner = figures["planner"]
    assert figures["slo"]["attained"] > 0.75
    assert planner["reversals"] == 0
    assert 3 <= planner["peak_workers"] <= 8
    kinds = [action["kind"] for decision in planner["decisions"] for action in decision["actions"]]
    assert "add_workers" in kinds
    assert "drain_worker" in kinds


def test_it_attains_more_than_thresholds_do() -> None:
    price = run("price", "1p+1d", (3.0, 10.0), 90.0)
    rival = run("dynamo-load", "1p+1d", (3.0, 10.0), 90.0)
    assert price["slo"]["attained"] > rival["slo"]["attained"]
