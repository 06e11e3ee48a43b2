"""Lengths of an interval without requests are holes, or carried along as Dynamo does."""

from __future__ import annotations

from pigou.control.planner.predictors.kalman import DynamoKalman
from pigou.control.planner.predictors.level import LastValue
from pigou.control.planner.predictors.workload_forecaster import WorkloadForecaster


def test_idle_intervals_say_nothing_of_lengths() -> None:
    forecaster = WorkloadForecaster(LastValue)
    forecaster.observe(10, 3000, 150)
    forecaster.observe(0, 0, 0)
    forecast = forecaster.forecast()
    assert (forecast.arrivals.mean, forecast.isl.mean, forecast.osl.mean) == (0, 3000, 150)


def test_a_hole_is_one_in_every_series() -> None:
    forecaster = WorkloadForecaster(LastValue)
    forecaster.observe(None, None, float("nan"))
    assert not forecaster.ready
    forecaster.observe(10, 3000, None)
    assert not forecaster.ready
    forecaster.observe(None, None, 20)
    assert forecaster.ready
    assert forecaster.forecast(3).arrivals.mean == 10


def test_dynamo_carries_the_last_lengths_through_idle_intervals() -> None:
    """The trend of lengths comes to rest, since equal values go on arriving."""
    carried = WorkloadForecaster(DynamoKalman, carry=True)
    plain = WorkloadForecaster(DynamoKalman)
    for forecaster in (carried, plain):
        forecaster.observe(0, 0, 0)
        for isl in (1000, 2000, 3000, 4000, 5000, 6000):
            forecaster.observe(5, isl, 100)
        for _ in range(60):
            forecaster.observe(0, float("nan"), float("nan"))
    assert abs(carried.forecast().isl.mean - 6000) < 1
    assert plain.forecast().isl.mean > 6500
    assert carried.forecast().arrivals.mean < 0.1
