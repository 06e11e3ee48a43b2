"""What the constants of the replication are derived from, and the arithmetic of the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import get_args

import numpy as np
import pytest
from scipy.optimize import brentq

from pigou.config import ConfigError
from pigou_lab.experiments import counterfactual
from pigou_lab.experiments.adaptive import flagged_runs, outlier_effect
from pigou_lab.experiments.fleets import FLEETS, POOL, READINGS, fleet
from pigou_lab.experiments.paper import (
    END_S,
    EXPERIMENT1,
    GAPS,
    GRIDS,
    LEVELS,
    OVERLAP_WEIGHTS,
    RAMP_S,
    TEMPERATURES,
    Figures,
    FleetName,
)
from pigou_lab.experiments.pareto import variance
from pigou_lab.experiments.results import log_rmse


def completed(users: int, slots: int, seconds: float) -> float:
    """Return the mean requests per second of a closed loop ramped over `RAMP_S`."""
    begins = RAMP_S * np.arange(min(users, slots)) / users
    return float(((END_S - begins) / seconds - 0.5).sum() / END_S)


def response(users: int, slots: int, rps: float) -> float:
    """Return the request seconds at which `completed` gives `rps`."""
    return float(brentq(lambda seconds: completed(users, slots, seconds) - rps, 0.1, 60.0))


def throughput_itl(
    rows: Mapping[int, Figures], slots: int, first: float, min_users: int = 8
) -> tuple[float, float]:
    """Return the ITL (s) that fits the throughput column, and its slope; rows weigh by rate^2."""
    users = [level for level in rows if level >= min_users]
    rates = np.array([rows[level].rps or 0.0 for level in users])
    times = np.array([response(level, slots, rows[level].rps or 0.0) for level in users])
    itl = (times - first) / GAPS
    flight = np.minimum(users, slots).astype(np.float64)
    weight = rates**2
    slope, _ = np.polyfit(flight, itl, 1, w=np.sqrt(weight))
    return float(np.average(itl, weights=weight)), float(slope)


def test_time_per_token_is_what_the_throughput_column_implies() -> None:
    one = fleet("340b-1p2d")
    itl, slope = throughput_itl(EXPERIMENT1["340b-1p2d"], POOL, 0.12)
    assert one.flat == pytest.approx(itl, rel=0.002)
    assert slope < 0.0  # so a constant is all that the column supports


def test_time_per_token_of_small_batches_is_the_mean_of_their_column() -> None:
    rows = EXPERIMENT1["340b-1p2d"]
    mean = sum(rows[users].itl_p99_s or 0.0 for users in (1, 2, 4)) / 3
    assert fleet("340b-1p2d").few == pytest.approx(mean, abs=0.05e-3)


def test_the_70b_line_gives_both_rates_that_it_is_drawn_through() -> None:
    one = fleet("70b-1p5d")
    for users, rate in ((32, 16.8), (100, 51.0)):
        a, b = one.line
        seconds = one.base + GAPS * (a + b * users / one.decoders)
        assert users / seconds == pytest.approx(rate, rel=0.005)


def test_it_predicts_the_ceiling_of_the_fleet_that_it_was_not_drawn_through() -> None:
    one = fleet("70b-1p2d")
    a, b = one.line
    assert POOL / (one.base + GAPS * (a + b * POOL / 2)) == pytest.approx(one.ceiling, rel=0.03)


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("reading", READINGS)
def test_a_lone_request_takes_the_paper_s_base(name: FleetName, reading: str) -> None:
    one = fleet(name)
    law = one.law(reading)  # type: ignore[arg-type]
    assert law.overhead + law.prefill + law.decode(1) == pytest.approx(one.base, rel=1e-6)


def test_completions_follow_from_ramp_and_response_time() -> None:
    assert completed(1, 100, 5.0) == pytest.approx((150 / 5 - 0.5) / 150)
    assert completed(512, 100, 5.4) < completed(512, 512, 5.4)
    assert response(128, 100, completed(128, 100, 5.4)) == pytest.approx(5.4)


def test_tables_are_whole() -> None:
    assert tuple(EXPERIMENT1["340b-1p2d"]) == LEVELS
    assert set(EXPERIMENT1) == set(GRIDS) == set(get_args(FleetName))
    for grids in GRIDS.values():
        for one in grids.values():
            if one.cells:
                assert [len(row) for row in one.cells] == [len(OVERLAP_WEIGHTS)] * len(TEMPERATURES)
                values = [value for row in one.cells for value in row]
                assert sum(values) / len(values) == pytest.approx(one.mean, abs=0.06)


def test_an_unknown_fleet_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"9b.*340b-1p2d"):
        fleet("9b")


def test_an_outlier_is_beyond_five_medians() -> None:
    assert flagged_runs([0.1, 0.1, 0.51]) == [2]
    assert flagged_runs([0.1, 0.1, 0.49]) == []
    found = outlier_effect([{"ttft_p99_s": 0.1}, {"ttft_p99_s": 0.2}, {"ttft_p99_s": 2.84}])
    assert found["flagged"] == [2]
    assert found["ttft_p99_with_s"] == pytest.approx(3.14 / 3)
    assert found["ttft_p99_without_s"] == pytest.approx(0.15)


def test_log_rmse_counts_a_factor_the_same_both_ways() -> None:
    rows = [
        {"concurrency": 128, "rps": 2.0, "paper": {"rps": 1.0}},
        {"concurrency": 256, "rps": 0.5, "paper": {"rps": 1.0}},
        {"concurrency": 64, "rps": 9.0, "paper": {"rps": 1.0}},
        {"concurrency": 512, "rps": 9.0, "paper": {"rps": None}},
    ]
    assert log_rmse(rows, "rps", 128) == pytest.approx(math.log(2))
    assert log_rmse(rows, "rps", 1000) is None


def test_variance_tells_cells_apart_whatever_seeds_do_to_all_of_them() -> None:
    def rows(*groups: tuple[float, ...]) -> list[dict[str, object]]:
        return [{"runs": [{"x": value} for value in group]} for group in groups]

    apart = variance(rows((1.0, 9.1), (2.0, 10.0), (3.0, 11.1)), "x")
    alike = variance(rows((1.0, 2.0), (2.0, 1.0), (1.4, 1.6)), "x")
    assert apart is not None
    assert alike is not None
    assert (apart["p"] or 1.0) < 0.01
    assert (apart["between"] or 0.0) == pytest.approx(1.0, rel=0.05)
    assert (apart["seeds"] or 0.0) > 5.0
    assert (alike["p"] or 0.0) > 0.5
    assert variance(rows((1.0,), (2.0,)), "x") is None
    same = variance(rows((1.0, 3.0), (1.0, 3.0)), "x")
    assert same is not None
    assert (same["f"], same["p"]) == (0.0, 1.0)
    shifted = variance(rows((1.0, 3.0), (2.0, 4.0)), "x")
    assert shifted is not None
    assert (shifted["f"], shifted["p"]) == (None, 0.0)


@pytest.mark.parametrize("name", ["340b-1p2d", "70b-1p5d"])
def test_static_routers_are_near_the_optimum_of_the_paper_s_cost_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counterfactual, "DRAWS", 30)
    found = {each["concurrency"]: each for each in counterfactual.static(fleet(name))}
    for users, each in found.items():
        assert each["round_robin"] == pytest.approx(1.0, abs=1e-9)
        assert 1.0 - 1e-9 <= each["two_choices"] <= each["random"] + 1e-9
        if users >= 8:
            assert each["two_choices"] < 1.02
