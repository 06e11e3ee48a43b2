"""The frontier of a model and the price that clears the budget, against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.planner.fluid_fleet import MIX, PREFILL
from tests.lib.examples import examples

from pigou.control.planner.price.frontier import (
    FrontierPoint,
    ModelPlan,
    PoolOption,
    clear_budget,
    shadow_price,
)
from pigou.control.planner.price.terms import PricePlannerParams
from pigou.games.latency import LatencyLaw
from pigou.objectives import Slo
from pigou.performance.capacity import CapacityCurve, reachable
from pigou.performance.model import PerformanceModel, joint_share
from pigou.performance.speed import DecodeLaw, PrefillLine, RequestMix
from pigou.request import Role

SLO = Slo(ttft_s=0.738, itl_s=0.03)
#: The anchor's V2: 2.0 rps a prefill worker at p95 of three bare prefills, 1.2 rps a decode worker.
V2 = PerformanceModel(
    PrefillLine(0.246, 0.0), DecodeLaw(LatencyLaw(0.0, 0.05)), max_seqs=18, pooled=False
)
V2_SLO = Slo(ttft_s=3 * 0.246, percentile=95)


def option(
    name: str, role: Role, performance: PerformanceModel = PREFILL, gpus: int = 1, most: int = 32
) -> PoolOption:
    return PoolOption(name, role, gpus, performance, 0, most, 0)


def plan(rps: float, *options: PoolOption, slo: Slo = SLO, mix: RequestMix = MIX) -> ModelPlan:
    return ModelPlan(PricePlannerParams(), rps, mix, options, [slo])


@given(rps=st.floats(0.5, 25), gpus=st.tuples(st.integers(1, 3), st.integers(1, 3)))
@settings(max_examples=examples(15))
def test_the_frontier_is_the_best_split_of_each_number_of_gpus(
    rps: float, gpus: tuple[int, int]
) -> None:
    own = plan(rps, option("p", Role.PREFILL, gpus=gpus[0]), option("d", Role.DECODE, gpus=gpus[1]))
    frontier = own.frontier(is_scarce=True)
    assert [point.gpus for point in frontier] == sorted({point.gpus for point in frontier})
    for total in range(1, 40):
        best = max(
            own.value({"p": p, "d": (total - p * gpus[0]) // gpus[1]})
            for p in range(total // gpus[0] + 1)
        )
        reached = max((q.value for q in frontier if q.gpus <= total), default=0.0)
        assert reached == pytest.approx(best, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("rps", "goodput"), [(6, 6.0), (8, 6.0), (10, 6.0), (12, 6.0), (16, 6.0)])
def test_more_demand_never_lowers_goodput(rps: float, goodput: float) -> None:
    """V2: the proportional clamp falls to 2.0 rps; the best split of 8 GPUs serves 6.0."""
    single = Slo(ttft_s=V2_SLO.ttft_s, percentile=95)
    # 1.2 rps a worker at p95 of the streams too, not of their mean of 18 alone
    decode = PerformanceModel(
        V2.prefill, DecodeLaw(LatencyLaw(0.0, 0.05)), max_seqs=21, pooled=False
    )
    own = plan(rps, option("p", Role.PREFILL, V2), option("d", Role.DECODE, decode), slo=single)
    cleared = clear_budget([own.frontier(is_scarce=True)], 8, 1.0)
    split = cleared.points[0].counts
    assert split["p"] + split["d"] <= 8
    served = min(2.0 * split["p"], 1.2 * split["d"], rps)
    assert served == pytest.approx(goodput, abs=0.02)


def test_where_gpus_are_scarce_the_pool_that_breaks_less_is_the_short_one() -> None:
    """12 rps on 4 workers: TTFT of 2P2D is a little late for some, ITL of 3P1D for all."""
    model = PerformanceModel(PrefillLine(0.005, 6e-5), DecodeLaw(LatencyLaw(0.0003, 0.008)))
    slo, mix = Slo(ttft_s=0.5, itl_s=0.025), RequestMix(2000, 200)
    slow = model.corrected(1.0, 1.0, 2.0)
    own = plan(
        12.6, option("p", Role.PREFILL, slow), option("d", Role.DECODE, slow), slo=slo, mix=mix
    )
    assert own.rps({"p": 3, "d": 1}) > own.rps({"p": 2, "d": 2})  # what admission would let in
    best = clear_budget([own.frontier(is_scarce=True)], 4, 1.0).points[0].counts
    assert best == {"p": 2, "d": 2}


def test_prefill_and_decode_are_complements() -> None:
    """One more of either alone is worth nothing where both are short; both together are."""
    own = plan(20.0, option("p", Role.PREFILL), option("d", Role.DECODE))
    p = 2
    d = next(n for n in range(1, 9) if own.curves["d"](n) > own.curves["p"](p))
    counts = {"p": p, "d": d}
    assert own.marginal(counts, {"d": 1}) == pytest.approx(0.0, abs=1e-6)
    assert own.marginal(counts, {"p": 1}) > 0


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.floats(0, 50)), min_size=1, max_size=4),
        min_size=1, max_size=3,
    ),
    st.integers(0, 14), st.floats(0.01, 5),
)  # fmt: skip
@settings(max_examples=examples(150))
def test_the_budget_is_divided_as_by_brute_force(
    models: list[list[tuple[int, float]]], gpus: int, price: float
) -> None:
    frontiers = [
        [FrontierPoint(n, v, v, 0.0, {}) for n, v in sorted(dict(own).items())] for own in models
    ]
    cleared = clear_budget(frontiers, gpus, price)
    feasible = [
        combo for combo in itertools.product(*frontiers) if sum(q.gpus for q in combo) <= gpus
    ]
    assert cleared.is_feasible is bool(feasible)
    if not feasible:
        return
    best = max(sum(q.value - price * q.gpus for q in combo) for combo in feasible)
    own = sum(q.value - price * q.gpus for q in cleared.points)
    assert own == pytest.approx(best, abs=1e-6)
    assert sum(q.gpus for q in cleared.points) <= gpus


@given(st.lists(st.integers(1, 30), min_size=2, max_size=6), st.integers(1, 40))
@settings(max_examples=examples(80))
def test_tatonnement_finds_the_price_at_which_demand_fits(slopes: list[int], gpus: int) -> None:
    """Each model's value is concave: slope x sqrt(GPUs)."""
    frontiers = [
        [FrontierPoint(n, 0.0, slope * math.sqrt(n), 0.0, {}) for n in range(30)]
        for slope in slopes
    ]
    price = shadow_price(frontiers, gpus, 0.01)

    def demand(at: float) -> int:
        return sum(max(f, key=lambda q: (q.value - at * q.gpus, -q.gpus)).gpus for f in frontiers)

    assert demand(price) <= gpus
    assert price == 0.01 or demand(price * 0.995) > gpus or demand(price) == gpus
    assert price <= max(slopes) * 1.001


def test_a_price_is_zero_where_the_budget_is_slack() -> None:
    own = plan(2.0, option("p", Role.PREFILL), option("d", Role.DECODE))
    assert clear_budget([own.frontier()], None, 1.0).price == 0.0
    assert clear_budget([own.frontier()], 30, 1.0).price == 0.0
    assert clear_budget([own.frontier()], 2, 1.0).price > 1.0


def test_a_move_must_pay_for_its_start() -> None:
    """What is there stays where what is not there would not be bought."""
    slight = PricePlannerParams(late_s=60.0, gpu_price=1.0, horizon_s=100.0)
    spare = option("b", Role.BOTH)
    need = CapacityCurve(PREFILL, Role.BOTH, MIX, [SLO])
    rps = need(1) + 0.025  # 1.5 weighted seconds a second beyond one worker
    costs = {"start_cost": 100.0, "removal_cost": 10.0}
    counts = []
    for supply in (1, 2):
        pool = PoolOption("b", Role.BOTH, 1, spare.performance, 0, 8, supply, **costs)
        own = ModelPlan(slight, rps, MIX, [pool], [SLO])
        counts.append(clear_budget([own.frontier()], None, 1.0).points[0].counts["b"])
    assert counts == [1, 2]


def test_a_pool_that_does_both_is_used_where_it_is_worth_more() -> None:
    """Short prompts, few tokens: one mixed worker instead of a pair."""
    short = RequestMix(isl=200, osl=20)
    both = plan(
        0.5, option("p", Role.PREFILL), option("d", Role.DECODE), option("b", Role.BOTH), mix=short
    )
    counts = clear_budget([both.frontier()], None, 1.0).points[0].counts
    assert counts == {"p": 0, "d": 0, "b": 1}


@given(workers=st.integers(1, 300))
@settings(max_examples=examples(20))
def test_capacity_between_its_knots_is_near_the_exact_one(workers: int) -> None:
    for role in (Role.PREFILL, Role.DECODE):
        exact = PREFILL.limit_rps(role, workers, MIX, SLO, joint_share(SLO))
        assert CapacityCurve(PREFILL, role, MIX, [SLO])(workers) == pytest.approx(exact, rel=0.01)


def test_an_objective_that_one_request_breaks_is_relaxed() -> None:
    for slo in (Slo(ttft_s=0.1, itl_s=0.03), Slo(ttft_s=1.0, itl_s=0.001)):
        curve = CapacityCurve(PREFILL, Role.BOTH, MIX, [slo])
        assert curve.is_relaxed
        assert curve(1) > 0
    assert reachable(SLO, PREFILL, Role.BOTH, MIX) == SLO
