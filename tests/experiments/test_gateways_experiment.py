"""The gateways' experiment judges what it says it judges."""

from __future__ import annotations

import pytest

from pigou.sim.fleet_config import GatewaysConfig
from pigou_lab.experiments.gateways import DEMANDS, deviation, simulation, verdict


def test_deviation_is_that_of_the_tenant_who_is_worst_off() -> None:
    one = {"a": 0.5, "b": 0.25, "c": 0.25}
    assert deviation(one, one) == 0.0
    assert deviation({"a": 0.6, "b": 0.2, "c": 0.2}, one) == pytest.approx(0.2)
    assert deviation({"a": 0.75, "b": 0.25}, one) == 1.0, "who got nothing"


def test_tenants_ask_for_more_than_there_is_and_more_than_their_equal_part() -> None:
    assert sum(DEMANDS) > 1.5
    assert min(DEMANDS) > 1 / len(DEMANDS)
    made = simulation(GatewaysConfig(count=2, lag_s=0.1), 1, overloaded=True)
    assert made.fleet.gateways is not None
    assert len(made.fleet.planes) == 2
    assert {plane.config.admission["order"] for plane in made.fleet.planes} == {"fair"}


def test_the_verdict_keeps_gateways_that_say_nothing_apart() -> None:
    rows = [
        {"gateways": 2, "lag_s": 0.0, "anarchy": 1.0, "unfairness": 0.02},
        {"gateways": 2, "lag_s": 1.0, "anarchy": 1.1, "unfairness": 0.05},
        {"gateways": 2, "lag_s": None, "anarchy": 1.3, "unfairness": 0.9},
    ]
    found = verdict(rows)
    assert (found["worst_anarchy"], found["worst_unfairness"]) == (1.1, 0.05)
    assert found["silent_anarchy"] == {"2": 1.3}
