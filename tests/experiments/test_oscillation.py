"""The oscillation under lag: the bound, how reversals are counted, and who oscillates."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from pigou_lab.experiments.fleets import fleet
from pigou_lab.experiments.oscillation import (
    CONTENDERS,
    constant_load,
    distinct_splits,
    lag_limit_s,
    late_reversals,
    settled_s,
    verdict,
)
from pigou_lab.experiments.planned_fleet import START_UP_S, planned_figures

GAIN = math.pi / 4 / START_UP_S


def record(at_s: float, prefill: int, decode: int) -> dict[str, Any]:
    def states(count: int) -> dict[str, int]:
        return {"starting": 1, "active": count - 1, "draining": 3}

    return {"at_s": at_s, "pools": {"prefill": states(prefill), "decode": states(decode)}}


def delayed_integrator(gain: float, lag_s: float, seconds: float, step_s: float) -> list[float]:
    """Return x of x'(t) = -gain x(t - lag_s), x = 1 until 0, in steps of `step_s`."""
    delay = max(round(lag_s / step_s), 0)
    values = [1.0] * (delay + 1)
    for _ in range(round(seconds / step_s)):
        values.append(values[-1] - gain * step_s * values[-1 - delay])
    return values[delay:]


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
    for name in ("paper", "price"):
        made = constant_load(fleet("340b-1p2d"), CONTENDERS[name][0], 50.0, seconds=300.0)
        reversals[name] = late_reversals(planned_figures(made.simulation(1))["replicas"], 150.0)
    assert reversals["paper"] > 0
    assert reversals["price"] == 0


#: Starts that are too small, or split wrong, shares of the load, lags, and seconds.
QUICK = ((5, 1), 0.5, 100.0, 500.0)
WIDE = [
    ((2, 4), 0.8, 200.0, 700.0),
    *(
        (start, load, lag, 1200.0)
        for start in ((1, 1), (1, 4), (1, 5), (2, 4), (3, 1), (4, 2), (5, 1))
        for load in (0.35, 0.65, 0.9)
        for lag in (0.0, 50.0, 150.0, 200.0)
    ),
]


@pytest.mark.parametrize(
    ("start", "load", "lag", "seconds"),
    [QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in WIDE)],
)
def test_price_does_not_turn_after_an_overloaded_start_at_lags_up_to_twice_the_start_up(
    start: tuple[int, int], load: float, lag: float, seconds: float
) -> None:
    made = constant_load(fleet("340b-1p2d"), "price", lag, seconds, start, load)
    replicas = planned_figures(made.simulation(3))["replicas"]
    assert late_reversals(replicas, settled_s(lag)) == 0
    for pool in (0, 1):  # what a backlog asks for may go again, once
        sizes = [split[pool] for split in distinct_splits(replicas)]
        signs = [after > before for before, after in itertools.pairwise(sizes) if after != before]
        assert sum(one != other for one, other in itertools.pairwise(signs)) <= 1


def test_the_verdict_has_the_reversals_by_lag() -> None:
    rows = [
        {"concurrency": lag, "contender": name, "late_reversals": lag * (name == "paper")}
        for lag in (1, 2)
        for name in CONTENDERS
    ]
    assert verdict(rows) == {
        "paper_late_reversals": {"1": 1, "2": 2},
        "paper_overloaded_late_reversals": {"1": 0, "2": 0},
        "price_late_reversals": {"1": 0, "2": 0},
        "price_overloaded_late_reversals": {"1": 0, "2": 0},
        "price_lag_limit_s": pytest.approx(200.0),
    }
