"""The oscillation under lag: the bound, how reversals are counted, and who oscillates."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pigou.experiments.fleets import fleet
from pigou.experiments.oscillation import (
    CONTENDERS,
    constant_load,
    delayed_integrator,
    distinct_splits,
    lag_limit_s,
    late_reversals,
    verdict,
)
from pigou.experiments.planned_fleet import START_UP_S, planned_figures

GAIN = math.pi / 4 / START_UP_S


def record(at_s: float, prefill: int, decode: int) -> dict[str, Any]:
    def states(count: int) -> dict[str, int]:
        return {"starting": 1, "active": count - 1, "draining": 3}

    return {"at_s": at_s, "pools": {"prefill": states(prefill), "decode": states(decode)}}


def test_the_gain_of_price_is_stable_up_to_twice_the_start_up_time() -> None:
    assert lag_limit_s(GAIN) == pytest.approx(2 * START_UP_S)


@pytest.mark.parametrize(("share", "decays"), [(0.0, True), (0.5, True), (0.95, True),
                                               (1.05, False)])  # fmt: skip
def test_an_integrator_decays_below_its_lag_limit_and_grows_above(
    share: float, decays: bool
) -> None:
    values = delayed_integrator(GAIN, share * lag_limit_s(GAIN), 6000.0, 1.0)
    early = max(abs(value) for value in values[:1000])
    late = max(abs(value) for value in values[-1000:])
    assert (late < early) == decays


def test_a_reversal_is_a_turn_of_one_pool_after_it_should_rest() -> None:
    grows = [record(0, 2, 4), record(50, 3, 4), record(400, 4, 3)]
    assert late_reversals(grows, 100.0) == 0
    turns = [*grows, record(450, 3, 3), record(500, 3, 4), record(550, 4, 4)]
    assert late_reversals(turns, 100.0) == 3
    assert late_reversals(turns, 520.0) == 1
    assert distinct_splits(grows) == [(2, 4), (3, 4), (4, 3)]


def test_the_paper_s_rule_oscillates_under_lag_and_price_does_not() -> None:
    reversals = {}
    for name, planner in CONTENDERS.items():
        made = constant_load(fleet("340b-1p2d"), planner, 50.0, seconds=500.0)
        reversals[name] = late_reversals(planned_figures(made.simulation(1))["replicas"], 150.0)
    assert reversals["paper"] > 0
    assert reversals["price"] == 0


def test_the_verdict_has_the_reversals_by_lag() -> None:
    rows = [
        {"concurrency": lag, "contender": name, "late_reversals": lag * (name == "paper")}
        for lag in (1, 2)
        for name in CONTENDERS
    ]
    assert verdict(rows) == {
        "paper_late_reversals": {"1": 1, "2": 2},
        "price_late_reversals": {"1": 0, "2": 0},
        "price_lag_limit_s": pytest.approx(200.0),
    }
