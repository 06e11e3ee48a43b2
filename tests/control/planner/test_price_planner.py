"""Laws of the price planner, and what users of others complained of, one test each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.control.planner.fluid_fleet import MIX, PREFILL, FluidFleet, FluidPool
from tests.lib.examples import examples

from benchmarks.control.planner.clairvoyant import fewest_workers
from pigou.config import ConfigError
from pigou.control.planner.messages import (
    Action,
    AddWorkers,
    DrainWorker,
    FlipRole,
    PlannerDecision,
    RebalancePool,
    RemoveWorker,
    SetOperatingPoint,
)
from pigou.control.planner.planner import Planner, PlannerSetup, load
from pigou.control.planner.price.terms import RISE_ERRORS
from pigou.games.latency import LatencyLaw
from pigou.objectives import Budget, ProvisioningTimes, Slo, WorkloadClass
from pigou.performance.model import PerformanceModel, joint_share
from pigou.performance.speed import DecodeLaw, PrefillLine, RequestMix
from pigou.request import SECOND, Role
from pigou.windows.planner_window import (
    LatencySummary,
    LoadWindow,
    PlannerWindow,
    PoolWindow,
    WorkerState,
    WorkerWindow,
)

SLO = Slo(ttft_s=0.738, itl_s=0.03)
START_UP_S = 60.0
TIMES = ProvisioningTimes(start_up_s=START_UP_S, drain_s=10)
Rate = Callable[[float], float]


def planner(
    budget: Budget | None = None,
    times: ProvisioningTimes = TIMES,
    slo: Slo = SLO,
    performance: PerformanceModel = PREFILL,
    **params: object,
) -> Planner:
    setup = PlannerSetup(
        slo=slo,
        budget=budget or Budget(max_gpus=32),
        times=times,
        performance=dict.fromkeys(("p", "d", "b", "p1", "d1", "p2", "d2"), performance),
    )
    return load("price", setup, params)


def fleet(rate: Rate, counts: dict[str, int] | None = None, **values: object) -> FluidFleet:
    pools = {"p": FluidPool(Role.PREFILL), "d": FluidPool(Role.DECODE)}
    times = values.pop("times", TIMES)
    assert isinstance(times, ProvisioningTimes)
    return FluidFleet(pools, counts or {"p": 1, "d": 1}, {"": rate}, times, **values)  # type: ignore[arg-type]


def pool_of(fleet: FluidFleet, action: Action) -> str:
    match action:
        case AddWorkers(pool=pool):
            return pool
        case DrainWorker(worker=worker) | RemoveWorker(worker=worker) | FlipRole(worker=worker):
            return worker.split("-")[0]
    raise AssertionError(action)


def undone(fleet: FluidFleet, within_s: float) -> list[tuple[float, float, str]]:
    """Return the moves of a pool that were undone within so many seconds: (from, until, pool)."""
    moves = [(at, pool_of(fleet, a), isinstance(a, AddWorkers)) for at, a in fleet.moves]
    return [
        (one, other, pool)
        for i, (one, pool, grows) in enumerate(moves)
        for other, pool_, grows_ in moves[i + 1 :]
        if pool == pool_ and grows != grows_ and other - one < within_s
    ]


# --- laws ----------------------------------------------------------------------------------------


@given(
    rps=st.floats(0.2, 25), p=st.integers(1, 12), d=st.integers(1, 12),
    start_up_s=st.sampled_from([5.0, 60.0, 200.0]), isl=st.floats(500, 5000),
)  # fmt: skip
@example(rps=12.5, p=1, d=3, start_up_s=5.0, isl=500.0)  # the first plan keeps the fleet
@settings(max_examples=examples(12))
def test_at_constant_load_moves_are_finite_and_the_objective_is_kept(
    rps: float, p: int, d: int, start_up_s: float, isl: float
) -> None:
    """It is kept but for a rate that errors of the estimate may explain (`LoadBand`)."""
    times = ProvisioningTimes(start_up_s=start_up_s, drain_s=10)
    mix = RequestMix(isl, 300)
    own = fleet(lambda t: rps, {"p": p, "d": d}, times=times, mix=lambda t, model: mix)
    price = planner(Budget(max_gpus=80), times)
    own.run(price, 8 * start_up_s + 600)
    settled = own.now_s - 300
    assert not [at for at, _ in own.moves if at > settled]
    least_rps = rps - RISE_ERRORS * price._models[""].band.estimate.rate.standard_error
    share = joint_share(SLO)
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        assert PREFILL.limit_rps(role, own.counts[name], mix, SLO, share) >= least_rps
        assert own.counts[name] <= 2 + 1.3 * math.ceil(
            fewest_workers(PREFILL, role, rps, mix, SLO, share) or 1
        )


@given(seed=st.integers(0, 10**6), rps=st.floats(2, 20))
@settings(max_examples=examples(6))
def test_noise_of_a_constant_load_makes_few_moves(seed: int, rps: float) -> None:
    own = fleet(lambda t: rps, {"p": 2, "d": 2}, seed=seed).run(planner(), 1800)
    assert len([at for at, _ in own.moves if at > 900]) <= 2


LEVELS = st.lists(
    st.tuples(st.floats(40, 300), st.floats(0.5, 20)), min_size=2, max_size=6
)  # (seconds, requests a second)


def stepwise(levels: list[tuple[float, float]]) -> Rate:
    def rate(t: float) -> float:
        for seconds, rps in levels:
            if t <= seconds:
                return rps
            t -= seconds
        return levels[-1][1]

    return rate


@given(levels=LEVELS, flip=st.sampled_from([math.inf, 15.0]))
@settings(max_examples=examples(12))
def test_no_move_is_undone_within_a_start_up_unless_arrivals_moved(
    levels: list[tuple[float, float]], flip: float
) -> None:
    times = ProvisioningTimes(start_up_s=START_UP_S, drain_s=10, flip_s=flip)
    rate = stepwise(levels)
    own = fleet(rate, times=times)
    own.run(planner(times=times), sum(seconds for seconds, _ in levels) + 400)
    for one, other, _ in undone(own, START_UP_S):
        rates = [rate(t) for t in range(int(one) - 60, int(other) + 1)]
        assert max(rates) > 1.05 * min(rates)


@given(levels=LEVELS, gpus=st.integers(4, 12))
@settings(max_examples=examples(10))
def test_the_budget_holds_also_while_two_models_are_rebalanced(
    levels: list[tuple[float, float]], gpus: int
) -> None:
    """Dynamo 12428: exceeded during a rebalance."""
    rate = stepwise(levels)
    pools = {
        f"{name}{model}": FluidPool(role, model=str(model), gpus=1)
        for model in (1, 2)
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    }
    own = FluidFleet(
        pools, dict.fromkeys(pools, 1), {"1": rate, "2": lambda t: 20 - rate(t)}, TIMES
    )
    own.run(planner(Budget(max_gpus=gpus)), sum(seconds for seconds, _ in levels) + 400)
    assert own.peak_gpus <= gpus
    assert all(min(counts.values()) >= 1 for counts in own.history)


@pytest.mark.parametrize("start_up_s", [60.0, 300.0])
def test_pending_capacity_counts(start_up_s: float) -> None:
    times = ProvisioningTimes(start_up_s=start_up_s, drain_s=10)
    own = fleet(lambda t: 10.0, times=times).run(planner(times=times), start_up_s)
    added = sum(a.count for _, a in own.moves if isinstance(a, AddWorkers))
    share = joint_share(SLO)
    wanted = sum(
        fewest_workers(PREFILL, role, 10.5, MIX, SLO, share) or 0
        for role in (Role.PREFILL, Role.DECODE)
    )
    assert added == wanted - 2
    assert own.decisions[-1].pools[0].pending > 0


def test_survivors_of_a_scale_down_stay_inside_the_objective() -> None:
    own = fleet(lambda t: 18.0 if t < 400 else 5.0)
    own.run(planner(), 1200)
    assert own.counts["p"] < 6
    share = joint_share(SLO)
    for decision in own.decisions[100:]:
        for plan, role in zip(decision.pools, (Role.PREFILL, Role.DECODE), strict=True):
            served = PREFILL.limit_rps(role, plan.wanted, MIX, SLO, share)
            assert served >= 5.0
            assert plan.ttft_s is not None
            assert plan.ttft_s <= SLO.ttft_s + 1e-9


def test_a_hole_in_the_metrics_is_not_zero_traffic() -> None:
    own = fleet(lambda t: 10.0, {"p": 4, "d": 3})
    price = planner()
    own.run(price, 300)
    moves = len(own.moves)
    own.edit = lambda window: msgspec.structs.replace(window, loads=())
    own.run(price, 2000)
    assert len(own.moves) == moves
    own.edit = lambda window: msgspec.structs.replace(
        window, loads=(LoadWindow(arrivals=None, isl=math.nan, osl=math.nan),)
    )
    own.run(price, 3000)
    assert len(own.moves) == moves


def test_the_step_of_a_correction_is_bounded_by_the_lag() -> None:
    """Below pi / 2 an integrator with a pure lag is stable; the corrections take half of that."""
    for lag_s in (10.0, 100.0, 1000.0):
        gain = 0.25 * math.pi / lag_s
        history = [1.0] * int(lag_s)
        value = 1.0
        for _ in range(int(20 * lag_s)):
            value -= gain * history[-int(lag_s)]
            history.append(value)
        assert max(abs(x) for x in history[-int(lag_s) :]) < 0.05


@pytest.mark.parametrize("lag", [0.5, 1.0, 2.0])
def test_there_is_no_reversal_after_settling_at_any_lag_up_to_twice_the_start_up(
    lag: float,
) -> None:
    """Workers come later than the planner was told: what is on its way counts.

    Workers for the backlog of the step may go when it is worked off: one change of direction.
    """
    own = fleet(
        lambda t: 4.0 if t < 100 else 16.0,
        times=ProvisioningTimes(start_up_s=lag * START_UP_S, drain_s=10),
    )
    own.run(planner(), 2400)
    for pool in ("p", "d"):
        grows = [isinstance(a, AddWorkers) for _, a in own.moves if pool_of(own, a) == pool]
        assert sum(one != other for one, other in itertools.pairwise(grows)) <= 1
    assert not [at for at, _ in own.moves if at > 1000]


# --- complaints of users, section 6 of the anchor -----------------------------------------------


def test_1_no_oscillation_of_small_pools_under_constant_load() -> None:
    """V1: ITL(N) = 5 + 36 / N ms, objective 40 ms: 2 -> 1 -> 2 by the flat rule; no move here."""
    performance = PerformanceModel(
        PrefillLine(0.001, 0.0), DecodeLaw(LatencyLaw(0.0005, 0.005)), max_seqs=512
    )
    rate = 72 / (200 * 0.023)  # 72 streams on two workers
    pools = {"b": FluidPool(Role.BOTH, performance=performance)}
    mix = RequestMix(100, 200)
    own = FluidFleet(pools, {"b": 2}, {"": lambda t: rate}, TIMES, mix=lambda t, m: mix)
    own.run(planner(slo=Slo(ttft_s=5, itl_s=0.04), performance=performance), 1500)
    assert own.moves == []


def test_2_slow_first_passes_of_new_workers_change_no_plan() -> None:
    """V3 in the loop: new workers report three times the seconds in their warm-up."""
    times = ProvisioningTimes(start_up_s=30, warm_up_s=40, drain_s=5)
    counts = []
    for factor in (1.0, 3.0):
        own = fleet(lambda t: 4.0 if t < 200 else 12.0, times=times)

        def slow(window: PlannerWindow, factor: float = factor) -> PlannerWindow:
            pools = []
            for pool in window.pools:
                workers = tuple(
                    msgspec.structs.replace(
                        w,
                        prefill_s=w.prefill_s and w.prefill_s * factor,
                        itl_s=w.itl_s and w.itl_s * factor,
                    )
                    if w.since_ns > 0 and window.now_ns - w.since_ns < 40 * SECOND
                    else w
                    for w in pool.workers
                )
                pools.append(msgspec.structs.replace(pool, workers=workers))
            return msgspec.structs.replace(window, pools=tuple(pools))

        own.edit = slow
        own.run(planner(times=times), 900)
        counts.append([(at, pool_of(own, a)) for at, a in own.moves])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("minimum", [0, 1])
def test_3_zero_traffic_scales_down_to_the_minimum_but_not_at_once(minimum: int) -> None:
    """Dynamo 6985: means are NaN at zero traffic, and 7P1D was held for ever."""
    own = fleet(lambda t: 10.0 if t < 300 else 0.0, {"p": 4, "d": 3})
    price = planner(Budget(max_gpus=32, min_workers=minimum))
    own.run(price, 300 + START_UP_S - 10)
    assert own.counts["p"] >= 4
    own.run(price, 900)
    assert own.counts == {"p": minimum, "d": minimum}


def test_3_workers_that_say_they_are_idle_end_a_hole() -> None:
    own = fleet(lambda t: 10.0 if t < 300 else 0.0, {"p": 4, "d": 3})
    price = planner()
    own.run(price, 300)
    own.edit = lambda window: msgspec.structs.replace(window, loads=())
    own.run(price, 330)
    assert own.counts["p"] >= 4
    own.run(price, 1200)
    assert own.counts == {"p": 1, "d": 1}


def test_4_a_pool_that_cannot_start_does_not_stop_the_others() -> None:
    """Dynamo 14251, and V5: the pending worker is cancelled when demand falls."""
    own = fleet(lambda t: 4.0 if t < 200 else 14.0 if t < 420 else 3.0, {"p": 2, "d": 1})
    own.pools["p"].can_start = True
    price = planner()
    own.run(price, 150)
    own.pools["p"].can_start = False

    def hide(window: PlannerWindow) -> PlannerWindow:  # its provider does not say so
        pools = tuple(msgspec.structs.replace(pool, can_start=True) for pool in window.pools)
        return msgspec.structs.replace(window, pools=pools)

    own.edit = hide
    own.run(price, 330)
    assert own.pools["p"].ready == 2
    stuck = [w for w in own.pools["p"].workers if w.state is WorkerState.STARTING]
    added = sum(a.count for _, a in own.moves if isinstance(a, AddWorkers) and a.pool == "p")
    assert len(stuck) == added  # waits for them, and orders no more
    assert own.pools["d"].ready > 1  # meanwhile the other pool grew
    own.run(price, 900)
    assert not [w for w in own.pools["p"].workers if w.state is WorkerState.STARTING]


def test_4_a_start_that_never_ends_is_given_up_and_not_tried_at_once() -> None:
    times = ProvisioningTimes(start_up_s=20, drain_s=5, give_up_s=60)
    own = fleet(lambda t: 10.0, {"p": 1, "d": 3}, times=times)
    own.pools["p"].can_start = False

    def hide(window: PlannerWindow) -> PlannerWindow:
        pools = []
        for pool in window.pools:
            workers = tuple(msgspec.structs.replace(w, unplaceable=False) for w in pool.workers)
            pools.append(msgspec.structs.replace(pool, workers=workers, can_start=True))
        return msgspec.structs.replace(window, pools=tuple(pools))

    own.edit = hide
    own.run(planner(times=times), 125)
    tries = [at for at, a in own.moves if isinstance(a, AddWorkers) and a.pool == "p"]
    assert len([at for at in tries if at < 125]) == 1
    assert [a for _, a in own.moves if isinstance(a, RemoveWorker)]
    assert any("given up" in reason for d in own.decisions for reason in d.reasons)


def test_4_where_nothing_can_start_a_role_is_flipped() -> None:
    times = ProvisioningTimes(start_up_s=60, drain_s=5, flip_s=10)

    def mix(t: float, model: str) -> RequestMix:
        return RequestMix(800, 900) if t < 200 else RequestMix(3000, 100)

    own = fleet(lambda t: 8.0, {"p": 1, "d": 6}, times=times, mix=mix)
    for pool in own.pools.values():
        pool.can_start = False
    own.run(planner(times=times), 600)
    assert [a for _, a in own.moves if isinstance(a, FlipRole)]
    assert not [a for _, a in own.moves if isinstance(a, AddWorkers)]
    assert own.counts["p"] == 3


@pytest.mark.parametrize(("isl", "osl", "grows"), [(6000, 60, "p"), (300, 900, "d")])
def test_5_the_pool_that_lacks_capacity_grows(isl: float, osl: float, grows: str) -> None:
    """llm-d 1213: a prefill-heavy load scaled decode."""
    mix = RequestMix(isl, osl)
    own = fleet(lambda t: 5.0, {"p": 1, "d": 1}, mix=lambda t, model: mix).run(planner(), 300)
    other = "d" if grows == "p" else "p"
    assert own.counts[grows] > own.counts[other]
    assert own.counts[other] <= 2


def test_6_a_ready_worker_is_drained_and_never_removed() -> None:
    """Dynamo 13559. The fleet asserts that no ready worker is removed."""
    own = fleet(lambda t: 18.0 if t < 300 else 2.0, {"p": 6, "d": 5}).run(planner(), 900)
    assert [a for _, a in own.moves if isinstance(a, DrainWorker)]
    assert not [a for _, a in own.moves if isinstance(a, RemoveWorker)]


def test_7_a_rising_load_is_planned_for_as_it_will_be_when_a_start_is_ready() -> None:
    """llm-d 1071: a cold start of minutes is outside every reactive loop."""
    late = {}
    for trend in (False, True):
        own = fleet(lambda t: 2.0 + 0.02 * t, {"p": 2, "d": 1}, seed=5)
        price = planner(trend=trend)
        misses = 0
        while own.now_s < 800:
            own.step(price)
            for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
                ready = own.pools[name].ready
                limit = PREFILL.limit_rps(role, ready, MIX, SLO, 0.95)
                misses += limit < own.rates[""](own.now_s)
        late[trend] = misses
    assert late[True] < 0.5 * late[False]


def test_8_workers_that_report_nothing_are_planned_by_arrivals() -> None:
    """Dynamo 13565: no metrics of the engines, no decision for ever."""
    own = fleet(lambda t: 10.0)

    def bare(window: PlannerWindow) -> PlannerWindow:
        pools = tuple(
            msgspec.structs.replace(
                pool,
                workers=tuple(
                    WorkerWindow(id=w.id, state=w.state, since_ns=w.since_ns) for w in pool.workers
                ),
            )
            for pool in window.pools
        )
        return msgspec.structs.replace(window, pools=pools)

    own.edit = bare
    own.run(planner(), 400)
    assert own.counts["p"] >= 3


def test_9_a_budget_is_never_off_and_what_it_refuses_is_said() -> None:
    """Dynamo 11220: a schema read as 0 GPUs, the limit never enforced; 10525: skipped, SUCCESS."""
    own = fleet(lambda t: 20.0).run(planner(Budget(max_gpus=4)), 400)
    assert own.peak_gpus <= 4
    assert own.decisions[-1].shadow_price > 1.0
    none = fleet(lambda t: 20.0).run(planner(Budget(max_gpus=0)), 100)
    assert none.moves == []
    assert any("below the minimum" in reason for reason in none.decisions[-1].reasons)
    with pytest.raises(TypeError):
        Budget(gpus=4)  # type: ignore[call-arg]


def test_10_what_is_planned_for_is_never_negative() -> None:
    """Dynamo 14493: the Kalman forecast of a falling load."""
    own = fleet(lambda t: max(10.0 - t / 40, 0.0), {"p": 4, "d": 3}).run(planner(), 700)
    forecasts = [f for decision in own.decisions for f in decision.forecasts]
    assert min(f.planned_rps for f in forecasts) >= 0
    assert min(f.low_rps for f in forecasts) >= 0


def _slower(window: PlannerWindow) -> PlannerWindow:
    return msgspec.structs.replace(window, pools=tuple(
        msgspec.structs.replace(pool, workers=tuple(
            msgspec.structs.replace(w, prefill_s=w.prefill_s and 1.2 * w.prefill_s)
            for w in pool.workers
        ))
        for pool in window.pools
    ))  # fmt: skip


@pytest.mark.parametrize("change", [2, -1])
def test_11_what_a_human_changes_is_adopted(change: int) -> None:
    """Dynamo 4420."""
    own = fleet(lambda t: 10.0, {"p": 4, "d": 3})
    price = planner()
    own.run(price, 400)
    before = own.counts["p"]
    if change > 0:
        for _ in range(change):
            own._start("p", WorkerState.READY, own.now_s)
    else:
        worker = next(w for w in own.pools["p"].workers if w.state is WorkerState.READY)
        worker.state, worker.since_s, worker.until_s = (
            WorkerState.DRAINING,
            own.now_s,
            own.now_s + 10,
        )
    moves = len(own.moves)
    own.run(price, 900)
    own.edit = _slower  # a new plan for the same load, which changes no pool
    own.run(price, 1500)
    assert own.counts["p"] == before + change
    assert len(own.moves) == moves


def test_11_what_crashed_is_replaced() -> None:
    own = fleet(lambda t: 10.0, {"p": 4, "d": 3})
    price = planner()
    own.run(price, 400)
    before = own.counts["p"]
    own.pools["p"].workers.pop()
    own.run(price, 600)
    assert own.counts["p"] == before


def test_11_the_objective_is_never_ignored() -> None:
    """Easy mode ignores ttft and itl."""
    counts = []
    for slo in (Slo(ttft_s=3.0, itl_s=0.05), Slo(ttft_s=0.5, itl_s=0.012)):
        own = fleet(lambda t: 12.0).run(planner(slo=slo), 500)
        counts.append(own.counts)
    assert counts[1]["p"] > counts[0]["p"]
    assert counts[1]["d"] > counts[0]["d"]


def test_12_two_replicas_of_the_planner_do_not_flap() -> None:
    """kubeai 67: leader and non-leader both scale, 12 flaps in 6 minutes."""
    own = fleet(lambda t: 4.0 if t < 100 else 12.0, {"p": 2, "d": 1})
    one, other = planner(), planner()
    while own.now_s < 1200:
        own.step(one)
        other.observe(own.window())
        for action in other.tick(int(own.now_s * SECOND)).actions:
            own._apply(action)
    assert len([at for at, _ in own.moves if at > 600]) <= 2
    assert own.peak_gpus < 20


# --- other vectors -------------------------------------------------------------------------------


def test_a_hot_worker_asks_for_a_rebalance_and_buys_nothing() -> None:
    """V6: one of ten at .95, the mean at .11."""
    own = fleet(lambda t: 8.0, {"p": 3, "d": 3})
    price = planner()
    own.run(price, 300)

    def heat(window: PlannerWindow) -> PlannerWindow:
        prefill, decode = window.pools
        workers = tuple(
            msgspec.structs.replace(w, kv_usage=0.95 if n == 0 else 0.02)
            for n, w in enumerate(decode.workers)
        )
        return msgspec.structs.replace(
            window, pools=(prefill, msgspec.structs.replace(decode, workers=workers))
        )

    own.edit = heat
    decision = own.step(price)
    hot = own.pools["d"].workers[0].id
    assert decision.actions == (RebalancePool("d", hot),)
    assert any("is full" in reason for reason in decision.reasons)


def test_the_price_of_anarchy_decides_and_says_nothing() -> None:
    """It does not lead (docs/notes/planner-trials.md)."""
    own, other = fleet(lambda t: 8.0, {"p": 3, "d": 3}), fleet(lambda t: 8.0, {"p": 3, "d": 3})
    own.edit = lambda window: msgspec.structs.replace(
        window, better_prefill={"": 2}, price_of_anarchy={"": 1.25}
    )
    one, two = planner(), planner()
    for _ in range(30):
        assert own.step(one) == other.step(two)


def test_the_cheapest_victim_goes_first() -> None:
    mix = RequestMix(3000, 300, hit_rate=0.5)
    own = fleet(lambda t: 14.0 if t < 200 else 2.0, {"p": 3, "d": 3}, mix=lambda t, m: mix)
    price = planner()

    def cache(window: PlannerWindow) -> PlannerWindow:
        pools = []
        for pool in window.pools:
            workers = tuple(
                msgspec.structs.replace(w, cached_tokens=0.0 if n == 1 else 2e5)
                for n, w in enumerate(pool.workers)
            )
            pools.append(msgspec.structs.replace(pool, workers=workers))
        return msgspec.structs.replace(window, pools=tuple(pools))

    own.edit = cache
    own.run(price, 500)
    drains = [a.worker for _, a in own.moves if isinstance(a, DrainWorker)]
    assert any(worker in ("p-2", "d-5") for worker in drains[:2])


def test_a_flip_comes_before_a_start_where_it_is_quicker() -> None:
    def mix(t: float, model: str) -> RequestMix:
        return RequestMix(3000, 100) if t < 300 else RequestMix(600, 900)

    flips = {}
    for flip_s in (15.0, 100.0):
        times = ProvisioningTimes(start_up_s=60, drain_s=5, flip_s=flip_s)
        own = fleet(lambda t: 8.0, {"p": 4, "d": 2}, times=times, mix=mix)
        own.run(planner(times=times), 700)
        flips[flip_s] = [a for _, a in own.moves if isinstance(a, FlipRole)]
        assert own.counts["d"] > 3
    assert flips[15.0]
    assert not flips[100.0]


def test_surplus_at_first_sight_is_held_unless_another_pool_lacks_its_gpus() -> None:
    drains = {}
    for gpus in (8, 32):
        own = fleet(lambda t: 7.0, {"p": 2, "d": 6})
        own.run(planner(Budget(max_gpus=gpus)), 170)
        drains[gpus] = [a for _, a in own.moves if isinstance(a, DrainWorker)]
        assert own.counts["p"] > 2
    assert drains[8]
    assert not drains[32]


def test_classes_share_a_pool_and_the_strictest_counts() -> None:
    strict = WorkloadClass(name="chat", slo=Slo(ttft_s=0.4, itl_s=0.02), weight=2)
    counts = []
    for workload in ("", "chat"):
        setup = PlannerSetup(
            slo=Slo(ttft_s=3.0, itl_s=0.05),
            classes=(strict,),
            times=TIMES,
            budget=Budget(max_gpus=64),
            performance={"p": PREFILL, "d": PREFILL},
        )
        own = fleet(lambda t: 12.0)

        def split(window: PlannerWindow, workload: str = workload) -> PlannerWindow:
            (load_window,) = window.loads
            half = msgspec.structs.replace(load_window, arrivals=(load_window.arrivals or 0) // 2)
            other = msgspec.structs.replace(half, workload=workload)
            loads = (half, other) if workload else (load_window,)
            return msgspec.structs.replace(window, loads=loads)

        own.edit = split
        own.run(load("price", setup), 400)
        counts.append(own.counts["p"])
    assert counts[1] > counts[0]


def test_a_backlog_is_worked_off() -> None:
    own = fleet(lambda t: 40.0 if t < 60 else 6.0, {"p": 3, "d": 3})
    own.run(planner(Budget(max_gpus=10)), 600)
    assert own.pools["p"].backlog_s < SLO.ttft_s


def test_speeds_are_learned_where_none_were_measured() -> None:
    setup = PlannerSetup(slo=SLO, budget=Budget(max_gpus=32), times=TIMES)
    own = fleet(lambda t: 10.0).run(load("price", setup), 900)
    share = joint_share(SLO)
    assert PREFILL.limit_rps(Role.PREFILL, own.counts["p"], MIX, SLO, share) >= 10.0
    assert own.counts["p"] <= 5
    first = fleet(lambda t: 0.0)
    decision = first.step(load("price", setup))
    assert any("not known" in reason for reason in decision.reasons)


@pytest.mark.parametrize("measured", [True, False])
def test_a_model_without_workers_wakes_up(measured: bool) -> None:
    """Scale to zero and back, also where no request has ended and no speed is known."""
    own = fleet(lambda t: 0.0 if t < 100 else 4.0, {"p": 0, "d": 0})
    performance = {"p": PREFILL, "d": PREFILL} if measured else {}
    setup = PlannerSetup(
        slo=SLO, budget=Budget(max_gpus=16, min_workers=0), times=TIMES, performance=performance
    )

    def young(window: PlannerWindow) -> PlannerWindow:  # nothing ends before somebody serves
        if all(pool.ready for pool in window.pools):
            return window
        loads = tuple(msgspec.structs.replace(x, osl=None) for x in window.loads)
        return msgspec.structs.replace(window, loads=loads)

    own.edit = young
    price = load("price", setup)
    own.run(price, 90)
    assert own.moves == []
    own.run(price, 500)
    assert own.pools["p"].ready >= 2
    assert own.pools["d"].ready >= 1


def test_late_requests_widen_the_plan_and_the_rest_is_given_back_where_that_does_not_help() -> None:
    own = fleet(lambda t: 9.0, {"p": 3, "d": 3})
    price = planner()
    own.edit = lambda window: msgspec.structs.replace(
        window,
        loads=tuple(
            msgspec.structs.replace(x, ended=x.arrivals, attained=int(0.7 * (x.arrivals or 0)))
            for x in window.loads
        ),
    )
    own.run(price, 1200)
    planned = [decision.forecasts[0].planned_rps for decision in own.decisions[5:]]
    assert max(planned) > 1.15 * 9.0
    assert planned[-1] < 1.1 * 9.0
    assert own.decisions[-1].forecasts[0].late_price == 60.0
    assert any("out of reach" in reason for reason in own.decisions[-1].reasons)


def test_a_decision_says_what_was_predicted_and_what_each_move_is_worth() -> None:
    own = fleet(lambda t: 8.0)
    price = planner()
    own.run(price, 15)
    decision = own.decisions[-1]
    assert {a.move for a in decision.alternatives if a.chosen} == {"add 2 p", "add 2 d"}
    prefill = decision.pools[0]
    assert prefill.wanted == 3
    assert prefill.pending == 2
    assert prefill.capacity_rps is not None
    assert prefill.capacity_rps >= 8.4
    assert decision.forecasts[0].planned_rps == pytest.approx(8.4, rel=0.1)
    line = msgspec.json.encode(decision)
    assert msgspec.json.decode(line, type=PlannerDecision) == decision


def test_the_same_windows_give_the_same_decisions() -> None:
    windows: list[PlannerWindow] = []
    own = fleet(stepwise([(200, 4), (300, 15), (400, 3)]), seed=7)

    def keep(window: PlannerWindow) -> PlannerWindow:
        windows.append(window)
        return window

    own.edit = keep
    own.run(planner(), 800)
    again = planner()
    decisions = []
    for window in windows:
        again.observe(msgspec.json.decode(msgspec.json.encode(window), type=PlannerWindow))
        decisions.append(again.tick(window.now_ns))
    assert decisions == own.decisions


def test_an_operating_point_holds_itl_where_it_is_asked_for() -> None:
    own = fleet(lambda t: 8.0, {"p": 3, "d": 3})
    own.run(planner(operating_points=True), 30)
    points = [a for _, a in own.log if isinstance(a, SetOperatingPoint)]
    assert len(points) == 1
    assert points[0].max_seqs == math.floor(PREFILL.batch(MIX, SLO.itl_s))


def test_a_window_that_is_out_of_order_is_ignored_and_a_tick_without_one_does_nothing() -> None:
    price = planner()
    assert price.tick(0).actions == ()
    pool = PoolWindow(name="p", role=Role.PREFILL, workers=(WorkerWindow(id="a"),))
    late = PlannerWindow(now_ns=9 * SECOND, seconds=5.0, pools=(pool,))
    price.observe(late)
    price.observe(msgspec.structs.replace(late, now_ns=3 * SECOND, pools=()))
    assert price.tick(9 * SECOND).pools[0].pool == "p"
    assert price.tick(10 * SECOND).actions == ()


@pytest.mark.parametrize(
    "params",
    [{"gpu_price": 0}, {"up": 1}, {"hold_s": -1}, {"late_s": math.inf}, {"predictor": "nobody"}],
)
def test_parameters_are_honoured_or_refused(params: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        fleet(lambda t: 1.0).run(planner(**params), 30)


def test_a_predictor_widens_the_plan() -> None:
    own = fleet(lambda t: 8.0)
    price = planner(predictor="last-value")
    own.run(price, 100)
    assert own.decisions[-1].forecasts[0].planned_rps >= 8.4


def test_latencies_of_a_window_may_be_missing() -> None:
    own = fleet(lambda t: 8.0)
    own.edit = lambda window: msgspec.structs.replace(
        window,
        loads=tuple(
            msgspec.structs.replace(x, ttft=LatencySummary(), itl=LatencySummary())
            for x in window.loads
        ),
    )
    assert own.run(planner(), 300).counts["p"] == 3
