"""Laws of several simulated gateways on one fleet."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pigou.config import ConfigError, ControlConfig
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, GatewaysConfig, ScalingConfig, read_fleet
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.workload import RequestLengths, renewal

LENGTHS = RequestLengths(input=(200, 600), output=(20, 60))
LAW = Setup(timing="law:itl_a=0.01,itl_b=0.0003,prefill=0.005,prefill_token=0.00002", blocks=4000)


def fleet(gateways: GatewaysConfig) -> FleetConfig:
    return msgspec.structs.replace(read_fleet("4xboth"), gateways=gateways)


def simulation(gateways: GatewaysConfig | None, **limits: Any) -> Simulation:
    free = dict.fromkeys(("max_inflight", "max_inflight_tokens", "max_queued"), UNLIMITED)
    control = ControlConfig(queue_timeout=UNLIMITED, **(free | limits))
    load = renewal(LENGTHS, 40.0, 1.0, 300, 0.0, seed=3)
    return Simulation(load, fleet(gateways or GatewaysConfig()), LAW, control, ClientConfig())


def figures(made: Simulation) -> dict[str, Any]:
    document = made.run().document()
    return {k: v for k, v in document.items() if k not in ("wall_s", "peak_rss_mb")}


@pytest.mark.parametrize("limits", [{}, {"max_inflight": 3}])
def test_gateways_that_hear_one_another_at_once_serve_as_one_does(limits: dict[str, int]) -> None:
    one, two = figures(simulation(None, **limits)), simulation(GatewaysConfig(count=2), **limits)
    several = figures(two)
    assert several["completed"] == one["completed"] == 300
    assert several["e2e_s"]["mean"] == pytest.approx(one["e2e_s"]["mean"], rel=0.05)
    assert min(several["gateways"]["requests"]) > 100


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_nothing_weighs_on_a_worker_once_all_has_ended_whatever_was_late_or_lost(
    loss: float,
) -> None:
    made = simulation(GatewaysConfig(count=3, lag_s=0.2, loss=loss), max_inflight=4)
    assert figures(made)["completed"] == 300
    for _ in range(5000):
        made.clock.step()
    for plane in made.fleet.planes:
        assert not plane.state.columns.decode_requests.any()
        assert not plane.state.columns.prefill_tokens.any()


def test_tenants_may_each_have_a_gateway_of_their_own() -> None:
    made = simulation(GatewaysConfig(count=2, split="tenant"))
    assert figures(made)["gateways"]["requests"] == [300, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count is 0"),
        ({"count": 1, "lag_s": 1.0}, "tells nobody anything"),
        ({"count": 2, "loss": 1.0}, "loss is 1.0"),
        ({"count": 2, "lag_s": -1.0}, "lag_s is -1.0"),
    ],
)
def test_what_no_fleet_has_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GatewaysConfig(**values)


def test_a_planner_and_several_gateways_are_refused_together() -> None:
    control, load = ControlConfig(), renewal(LENGTHS, 40.0, 1.0, 10, 0.0, seed=3)
    with pytest.raises(ConfigError, match="several gateways"):
        Simulation(
            load, fleet(GatewaysConfig(count=2)), LAW, control, ClientConfig(),
            scaling=ScalingConfig(planner={"planner": "static"}),
        )  # fmt: skip
