"""The price planner on a simulated fleet, with the production scheduler below."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pigou.config import ControlConfig
from pigou.request import SECOND
from pigou.sim.arrival_rate import RateSchedule
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import ScalingConfig, read_fleet
from pigou.sim.result import is_attained
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.virtual_clock import EPOCH
from pigou.sim.workload import OpenLoop, RequestLengths, RequestSession, RequestSpec, renewal

LAW = "law:itl_a=0.008,itl_b=0.0003,prefill=0.005,prefill_token=0.00006"
SLO = "ttft=0.5,itl=0.025"


def simulation(workload: OpenLoop, planner: str, fleet: str, slo: str) -> Simulation:
    """Return a run of a planner from a fleet on, with starts of 15 s."""
    return Simulation(
        workload,
        read_fleet(fleet),
        Setup(timing=LAW, blocks=20_000),
        ControlConfig(max_inflight=UNLIMITED, max_inflight_tokens=UNLIMITED,
                      queue_timeout=UNLIMITED, max_queued=UNLIMITED),
        ClientConfig(), seed=0,
        scaling=ScalingConfig(slo=slo, planner={"planner": planner}, max_workers=12, start_up=15.0),
    )  # fmt: skip


def run(planner: str, fleet: str, rates: tuple[float, ...], hold: float) -> dict[str, Any]:
    """Return the figures of a run with steps of the rate every `hold` seconds."""
    schedule = RateSchedule(seconds=tuple(hold * n for n in range(len(rates))), rates=rates)
    lengths = RequestLengths(input=(1000, 3000), output=(50, 150))
    load = renewal(lengths, schedule, 1.0, 0, hold * len(rates), 1)
    document: dict[str, Any] = simulation(load, planner, fleet, SLO).run().document()
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
    price = run("price", "1p+1d", (3.0, 10.0), 60.0)
    rival = run("dynamo-load", "1p+1d", (3.0, 10.0), 60.0)
    assert price["slo"]["attained"] > rival["slo"]["attained"]


@pytest.mark.parametrize("fleet", ["1p+1d", "2xboth"])
def test_arrivals_in_bursts_take_more_workers_than_their_rate_does(fleet: str) -> None:
    rng = np.random.default_rng(3)
    sessions = [
        RequestSession(
            4 * SECOND * burst,
            (RequestSpec(int(rng.integers(1000, 3000)), int(rng.integers(50, 150))),),
        )
        for burst in range(45)
        for _ in range(rng.poisson(12))
    ]
    made = simulation(OpenLoop(tuple(sessions)), "price", fleet, "ttft=0.8,itl=0.025")
    made.run()
    late = [
        is_attained(made.objectives, one, one.intended_ns)
        for one in made.client.runs
        if one.intended_ns > EPOCH + 60 * SECOND
    ]
    assert sum(late) / len(late) > 0.92  # 0.77 of two workers, without the dispersion
