"""The load that a plan is for: what few requests show, and where the first plan begins."""

from __future__ import annotations

import pytest

from pigou.control.planner.predictors.arrivals import ArrivalRate
from pigou.control.planner.price.load_band import LoadBand
from pigou.control.planner.price.terms import PricePlannerParams
from pigou.objectives import ProvisioningTimes
from pigou.windows.planner_window import LoadWindow


def tracker(counts: list[int], osl: float = 100.0, scv: float = 1.0) -> LoadBand:
    made = LoadBand(PricePlannerParams(), ProvisioningTimes(), 5.0)
    for count in counts:
        load = LoadWindow(arrivals=count, isl=1000.0, osl=osl, arrival_scv=scv, completed=count)
        made.observe(float(count), 5.0, load, 0.0)
    return made


def test_the_first_plan_is_for_the_fleet_as_it_is_where_that_may_do() -> None:
    made = tracker([10] * 3)
    estimate = made.planned
    made.begin(2.0)
    assert made.planned.rps == 2.0  # inside the interval
    made.begin(50.0)
    assert estimate.high_rps < made.planned.rps < 1.06 * estimate.high_rps
    too_small = tracker([10] * 3)
    too_small.begin(0.1)
    assert too_small.planned.rps == estimate.rps


def test_lengths_are_means_over_requests_not_over_windows() -> None:
    made = tracker([90])
    load = LoadWindow(arrivals=10, isl=2000.0, osl=200.0, completed=10)
    made.observe(10.0, 5.0, load, 0.0)
    mix = made.estimate.mix
    assert mix is not None
    assert mix.isl == pytest.approx(1100.0, rel=0.01)
    assert mix.osl == pytest.approx(110.0, rel=0.01)


def test_gaps_of_few_arrivals_count_as_those_of_a_poisson_process() -> None:
    few, many = tracker([3], scv=5.0).estimate.mix, tracker([300] * 10, scv=5.0).estimate.mix
    assert few is not None
    assert many is not None
    assert few.arrival_scv == pytest.approx(1.0 + 4.0 * 3 / 33)
    assert many.arrival_scv > 4.9


def test_the_standard_error_of_a_rate_falls_with_the_arrivals() -> None:
    rate, errors = ArrivalRate(), []
    assert rate.standard_error == 0.0
    for _ in range(6):
        rate.observe_bin(50.0, 5.0)
        errors.append(rate.standard_error)
    assert errors[0] == pytest.approx(50**0.5 / 5)
    assert errors == sorted(errors, reverse=True)


def test_surplus_goes_by_halves_after_half_of_the_hold_and_after_all_of_it() -> None:
    hold_bins = round(PricePlannerParams().hold_seconds(ProvisioningTimes().start_up_s) / 5)
    high = tracker([50] * hold_bins).planned.rps
    planned = [
        tracker([50] * hold_bins + [10] * bins).planned.rps
        for bins in (hold_bins // 2 - 2, hold_bins // 2 + 6, hold_bins + 8)
    ]
    assert planned[0] == high
    assert planned[1] == pytest.approx(0.5 * (high + planned[2]), rel=0.1)
    assert planned[2] == pytest.approx(high / 5, rel=0.15)
