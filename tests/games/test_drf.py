"""Dominant Resource Fairness: known answers, and laws over random tenants."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from pigou.games.drf import (
    DominantShares,
    asset_fair,
    drf,
    dynamic_drf,
    dynamic_max_min,
    max_min,
)

#: Ghodsi et al.: 9 CPUs and 18 GB; A's tasks take 1 and 4, B's 3 and 1.
DEMANDS, CAPACITIES = [[1.0, 4.0], [3.0, 1.0]], [9.0, 18.0]
#: Three periods of three users who share capacity 1.
MOVING = [[0.75, 1.0, 0.0], [0.75, 0.25, 0.75], [0.75, 0.5, 0.25]]


def test_the_paper_s_example_levels_dominant_shares_at_two_thirds() -> None:
    made = drf(DEMANDS, CAPACITIES)
    assert made.tasks == pytest.approx([3, 2])
    assert made.shares == pytest.approx([2 / 3, 2 / 3])
    assert made.used == pytest.approx([9, 14])
    assert drf(DEMANDS, CAPACITIES, indivisible=True).tasks.tolist() == [3, 2]


def test_limits_leave_the_remainder_to_others_and_weights_scale_shares() -> None:
    limited = drf(DEMANDS, CAPACITIES, limits=[1, math.inf])
    assert limited.tasks == pytest.approx([1, 8 / 3])
    assert limited.shares[1] == pytest.approx(8 / 9)
    weighted = drf(DEMANDS, CAPACITIES, weights=[2, 1])
    assert weighted.tasks == pytest.approx([54 / 13, 18 / 13])
    assert weighted.levels == pytest.approx([6 / 13, 6 / 13])
    by_resource = drf(DEMANDS, CAPACITIES, weights=[[1, 2], [1, 1]])
    assert by_resource.tasks == pytest.approx(weighted.tasks)  # A's dominant resource has weight 2


def test_asset_fairness_leaves_one_below_its_slice() -> None:
    assert asset_fair(DEMANDS, CAPACITIES).tasks == pytest.approx([2.52, 2.16])
    made = asset_fair([[1, 3], [1, 1]], [30, 30])  # Ghodsi et al., section 4.1
    assert made.tasks == pytest.approx([6, 12])  # B would have 15 from half of everything


def test_a_claim_of_more_wins_no_task() -> None:
    assert drf([[1, 4], [3, 2]], CAPACITIES).tasks[1] == pytest.approx(2.0)


def test_needs_of_nothing_and_of_what_is_not_there() -> None:
    made = drf([[0, 0], [1, 0], [0, 1], [0, 0]], [4, 0], limits=[3, 9, 9, math.inf])
    assert made.tasks.tolist() == [3, 4, 0, 0]
    assert drf([[2, 1]], [9, 18]).tasks == pytest.approx([4.5])
    assert drf(np.empty((0, 2)), [9, 18]).tasks.shape == (0,)


@pytest.mark.parametrize("seed", range(6))
def test_shares_are_those_of_the_lexicographic_programs(seed: int) -> None:
    """Three resources, weights of each, caps, shares from before: max-min by linear programs."""
    rng = np.random.default_rng(seed)
    n, m = 3, 3
    demands = rng.integers(0, 6, (2, n, m)).astype(float)
    demands[:, :, 0] += 1.0
    room, limits = rng.uniform(5, 30, (2, m)), rng.uniform(0.2, 4, (2, n))
    weights = rng.uniform(0.5, 3, (n, m) if seed % 2 else n)
    by_resource = weights if weights.ndim == 2 else weights[:, None]
    found, level = dynamic_drf(demands, room, limits, weights=weights), np.zeros(n)
    for t in range(2):
        rates = (demands[t] / room[t] / by_resource).max(axis=1)
        want = lexicographic(rates, demands[t], room[t], limits[t], level)
        assert found[t] == pytest.approx(want, abs=1e-6)
        level += found[t] * rates
    assert found[0] == pytest.approx(
        drf(demands[0], room[0], weights=weights, limits=limits[0]).tasks
    )


def lexicographic(rates, needs, room, limits, level):  # type: ignore[no-untyped-def]
    """Raise the lowest level as far as it goes, fix who cannot rise, and so on."""
    n = len(rates)
    done: dict[int, float] = {}

    def best(row, levels_from):  # type: ignore[no-untyped-def]
        bounds = [(done.get(i, 0.0), done.get(i, limits[i])) for i in range(n)]
        above = [i for i in range(n) if i not in done]
        rows = [[*needs[:, r], 0.0] for r in range(len(room))]
        rows += [[-rates[i] * (i == j) for j in range(n)] + [levels_from is None] for i in above]
        ends = [*room, *(level[above] - (levels_from or 0.0))]
        found = linprog(row, np.array(rows, float), ends, bounds=[*bounds, (None, None)])
        return -found.fun

    while len(done) < n:
        water = best([0.0] * n + [-1.0], None)
        for i in [i for i in range(n) if i not in done]:
            most = best([-rates[j] * (i == j) for j in range(n)] + [0.0], water - 1e-9)
            if level[i] + most <= water + 1e-7:
                done[i] = max(0.0, (water - level[i]) / rates[i])
    return [done[i] for i in range(n)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_filling_is_efficient_envy_free_and_worth_sharing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, m = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    demands = rng.integers(0, 6, (n, m)).astype(float)
    demands[:, 0] = np.maximum(demands[:, 0], rng.integers(1, 3, n))
    capacities, weights = rng.uniform(1, 20, m), rng.uniform(0.5, 3, n)
    limits = np.where(rng.random(n) < 0.3, rng.uniform(0, 3, n), np.inf)
    made = drf(demands, capacities, weights=weights, limits=limits)
    assert (made.used <= capacities * (1 + 1e-9)).all()
    full = made.used >= capacities * (1 - 1e-9)
    done = made.tasks >= limits - 1e-9
    assert (done | (demands[:, full] > 0).any(axis=1)).all()  # Pareto-efficient
    needs = np.where(demands > 0, demands, np.nan)
    alone = np.nanmin(capacities * (weights / weights.sum())[:, None] / needs, axis=1)
    assert (made.tasks >= np.minimum(alone, limits) - 1e-9).all()  # sharing incentive
    for i in range(n):
        for j in range(n):
            bundle = made.tasks[j] * demands[j] * weights[i] / weights[j]
            other = min(np.nanmin(bundle / needs[i]), limits[i])
            assert made.tasks[i] >= other - 1e-9  # envy-free
    whole = drf(demands, capacities, weights=weights, limits=limits, indivisible=True)
    left = capacities - whole.used
    fits = (demands <= left - 1e-9).all(axis=1) & (whole.tasks + 1 <= limits)
    assert not fits.any()
    assert (whole.tasks == np.floor(whole.tasks)).all()


def test_dynamic_max_min_levels_totals_and_under_claiming_early_pays() -> None:
    honest = dynamic_max_min(MOVING, 1)
    assert honest == pytest.approx(
        np.array([[0.5, 0.5, 0], [1 / 6, 1 / 6, 2 / 3], [0.375, 0.375, 0.25]])
    )
    instant = sum(max_min(row, 1) for row in MOVING)
    assert instant == pytest.approx([1.25, 1.125, 0.625])
    reports = np.array(MOVING)
    reports[:, 0] = 0, 0.5, 0.75
    assert dynamic_max_min(reports, 1)[:, 0].sum() == pytest.approx(1.125)
    assert honest[:, 0].sum() == pytest.approx(1.0417, abs=1e-4)


def test_dynamic_drf_of_one_period_is_drf_and_later_ones_repay() -> None:
    once = dynamic_drf(DEMANDS, CAPACITIES, [[math.inf, math.inf]])
    assert once[0] == pytest.approx([3, 2])
    late = dynamic_drf(DEMANDS, CAPACITIES, [[math.inf, 0], [math.inf, math.inf]])
    assert late[0] == pytest.approx([4.5, 0])
    assert late[1] == pytest.approx([0, 3])  # B has all it can use until its share is A's, 1


def test_dominant_shares_follow_what_comes_and_goes() -> None:
    shares = DominantShares([100.0, 10.0])
    shares.charge("a", [50.0, 1.0])
    shares.charge("b", [10.0, 3.0])
    assert shares.share("a") == 0.5
    assert shares.share("b", weight=3) == pytest.approx(0.1)
    assert shares.lowest([("a", 1.0), ("b", 1.0), ("c", 1.0)]) == "c"
    assert shares.lowest([("a", 2.0), ("b", 1.0)]) == "a"
    shares.charge("a", [-50.0, -1.0])
    assert shares.share("a") == 0.0
    shares.resize([100.0, 0.0])
    assert shares.share("b") == math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: drf([[1, -1]], [1, 1]), r"demands\[0, 1\] is -1"),
        (lambda: drf([[1, 1]], [1]), r"capacities|shape"),
        (lambda: drf([[1]], [math.nan]), r"capacities\[0\] is nan"),
        (lambda: drf([[1]], [1], weights=[0]), r"weights\[0\] is 0"),
        (lambda: drf([[1], [1]], [1], limits=[1]), r"limits has shape \(1,\)"),
        (lambda: drf([[1], [1, 2]], [1]), "demands is"),
        (lambda: dynamic_max_min([[1, -2]], 1), r"demands\[0, 1\]"),
        (lambda: dynamic_drf([[1]], [[1], [1]], [[1]]), "do not fit"),
        (lambda: dynamic_max_min([[1, 2]], [1, 2]), r"capacity has shape \(2,\)"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()
