"""Rivals' rules against their published figures: the anchor's sections 2, 4, 7."""

from __future__ import annotations

import math

import msgspec
import pytest
from tests.control.planner.fluid_fleet import MIX, PREFILL, FluidFleet, FluidPool

from pigou.config import ConfigError
from pigou.control.planner.messages import AddWorkers, DrainWorker, RemoveWorker
from pigou.control.planner.planner import PlannerSetup, load
from pigou.control.planner.target_planner import carry_out
from pigou.games.latency import LatencyLaw
from pigou.objectives import Budget, ProvisioningTimes, Slo
from pigou.performance.model import PerformanceModel
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
from pigou_lab.planner.aibrix import ApaParams, apa_desired
from pigou_lab.planner.dynamo_budget import clamp_to_budget
from pigou_lab.planner.dynamo_engine import EngineModel
from pigou_lab.planner.dynamo_sla import decode_replicas, prefill_replicas

RIVALS = (
    "apa", "dynamo", "dynamo-load", "dynamo-sla", "heteroscale", "hpa-cpu", "hpa-qps", "kpa",
    "ray", "static", "wva",
)  # fmt: skip
TIMES = ProvisioningTimes(start_up_s=30, drain_s=5)
SETUP = PlannerSetup(
    slo=Slo(ttft_s=0.738, itl_s=0.05),
    budget=Budget(max_gpus=8),
    times=TIMES,
    performance={"p": PREFILL, "d": PREFILL},
)


def window(
    now_s: float, *pools: PoolWindow, seconds: float = 30.0, **load_values: object
) -> PlannerWindow:
    loads = (LoadWindow(**load_values),) if load_values else ()  # type: ignore[arg-type]
    return PlannerWindow(now_ns=int(now_s * SECOND), seconds=seconds, loads=loads, pools=pools)


def pool(role: Role, *workers: WorkerWindow, name: str = "d", gpus: int = 1) -> PoolWindow:
    return PoolWindow(name=name, role=role, gpus=gpus, workers=workers)


def workers(count: int, **values: object) -> tuple[WorkerWindow, ...]:
    return tuple(WorkerWindow(id=f"w{n}", since_ns=n, **values) for n in range(count))  # type: ignore[arg-type]


# --- finding them -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RIVALS)
def test_each_is_found_by_name_and_refuses_what_it_does_not_know(name: str) -> None:
    planner = load(name, SETUP)
    assert planner.name == name
    assert load(name, SETUP, {}).tick(0).actions == ()
    with pytest.raises(ConfigError, match="no parameter"):
        load(name, SETUP, {"colour": 1})


def test_a_wrong_name_or_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        load("nobody", SETUP)
    with pytest.raises(ConfigError, match="target"):
        load("hpa-qps", SETUP, {"target": 0})
    with pytest.raises(ConfigError, match="performance"):
        load("dynamo-sla", PlannerSetup())


@pytest.mark.parametrize("name", RIVALS)
def test_none_exceeds_the_budget_or_undercuts_the_minimum(name: str) -> None:
    params = {"target": 0.5} if name == "hpa-qps" else {}
    planner = load(name, SETUP, params)
    fleet = FluidFleet(
        {"p": FluidPool(Role.PREFILL), "d": FluidPool(Role.DECODE)},
        {"p": 1, "d": 1},
        {"": lambda t: 30.0 if 100 < t < 500 else 1.0},
        TIMES,
    )
    fleet.run(planner, 1500)
    assert fleet.peak_gpus <= 8
    assert all(min(counts.values()) >= 1 for counts in fleet.history)


# --- carrying out ---------------------------------------------------------------------------------


def test_starting_workers_go_first_then_the_youngest() -> None:
    own = (
        *workers(2),
        WorkerWindow(id="s", state=WorkerState.STARTING, since_ns=9),
        WorkerWindow(id="x", state=WorkerState.DRAINING),
    )
    actions, _ = carry_out(window(9, pool(Role.DECODE, *own)), {"d": 1}, Budget())
    assert actions == (RemoveWorker("s"), DrainWorker("w1"))


def test_draining_workers_count_in_the_budget() -> None:
    own = (*workers(2), WorkerWindow(id="x", state=WorkerState.DRAINING))
    actions, reasons = carry_out(
        window(9, pool(Role.DECODE, *own, gpus=2)), {"d": 4}, Budget(max_gpus=8)
    )
    assert actions == (AddWorkers("d", 1),)
    assert "budget" in reasons[0]


# --- Dynamo ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "clamped"),
    [((2), 5, (2, 5)), (2, 7, (1, 7)), (3, 9, (2, 6)), (3, 10, (1, 7)), (4, 14, (1, 7))],
)
def test_the_clamp_is_as_in_the_anchors_table(
    prefill: int, decode: int, clamped: tuple[int, int]
) -> None:
    assert clamp_to_budget(prefill, decode, (1, 1), (0, 8)) == clamped


@pytest.mark.parametrize(
    ("rps", "asks", "mean", "best_mean", "p95", "best_p95"),
    [
        (6, (2, 5), 6.0, 6.0, 4.0, 6.0), (8, (2, 7), 4.07, 7.2, 2.0, 6.0),
        (10, (3, 9), 7.2, 7.2, 4.0, 6.0), (12, (3, 10), 4.07, 7.2, 2.0, 6.0),
        (16, (4, 14), 4.07, 7.2, 2.0, 6.0),
    ],
)  # fmt: skip
def test_the_proportional_clamp_loses_goodput(
    rps: float, asks: tuple[int, int], mean: float, best_mean: float, p95: float, best_p95: float
) -> None:
    """V2: more demand lowers goodput (10 to 12 rps); a planning Price of Anarchy of 1.77 and 3."""
    flat = PerformanceModel(PrefillLine(0.246, 0.0), DecodeLaw(LatencyLaw(0.0, 0.05)), max_seqs=18)
    p = prefill_replicas(flat, rps, 3000)
    d = math.ceil(rps / 1.2 - 1e-9)
    assert (p, d) == asks
    split = clamp_to_budget(p, d, (1, 1), (0, 8))

    def goodput(split: tuple[int, int], engine_rps: float) -> float:
        return min(split[0] * engine_rps, split[1] * 1.2, rps)

    splits = [(n, 8 - n) for n in range(1, 8)]
    one = flat.limit_rps(Role.PREFILL, 1, MIX, Slo(ttft_s=3 * 0.246), 0.95)
    for engine_rps, own, best in ((1 / 0.246, mean, best_mean), (one, p95, best_p95)):
        assert goodput(split, engine_rps) == pytest.approx(own, abs=0.02)
        assert max(goodput(s, engine_rps) for s in splits) == pytest.approx(best, abs=0.02)


def test_growth_to_a_minimum_is_mirrored_and_an_infeasible_one_gives_none() -> None:
    assert clamp_to_budget(1, 2, (1, 1), (9, 16)) == (3, 6)
    assert clamp_to_budget(2, 2, (4, 4), (0, 7)) == (0, 0)
    assert clamp_to_budget(3, 9, (1, 1), (0, None)) == (3, 9)


@pytest.mark.parametrize(("rps", "count"), [(20, 1), (33.36, 1), (33.38, 2), (60, 2), (80, 3)])
def test_a_prefill_worker_saturates_at_its_tokens_a_second(rps: float, count: int) -> None:
    """The worked example (PR 2557): 10,010 tokens a second, 33.37 rps of 300 tokens."""
    performance = PerformanceModel(
        PrefillLine(0.0, 300 / 10_010 / 300), DecodeLaw(LatencyLaw(0.0, 0.01))
    )
    assert prefill_replicas(performance, rps, 300) == count


def test_decode_replicas_are_littles_law() -> None:
    flat = PerformanceModel(PrefillLine(0.1, 0.0), DecodeLaw(LatencyLaw(0.001, 0.02)))
    # 30 streams at 50 ms: 600 tokens a second; 10 rps of 300 tokens are 3,000
    assert decode_replicas(flat, 10.0, 1000, 300, 0.05) == 5
    engine = EngineModel(flat, Role.DECODE).capacity(1000, 300, math.inf, 0.05)
    assert engine == pytest.approx((2.0, True), rel=0.02)


@pytest.mark.parametrize("name", ["dynamo", "dynamo-sla"])
def test_a_rise_from_8_to_25_moves_1p1d_to_2p1d(name: str) -> None:
    """PR 2525: 8, 15, then 25 rps."""
    performance = PerformanceModel(
        PrefillLine(0.0, 0.05 / 3000), DecodeLaw(LatencyLaw(0.0001, 0.005))
    )
    setup = PlannerSetup(
        slo=Slo(ttft_s=0.5, itl_s=0.05),
        budget=Budget(max_gpus=8),
        times=TIMES,
        performance={"p": performance, "d": performance},
    )
    planner = load(name, setup, {"predictor": "last-value"})
    fleet = FluidFleet(
        {
            "p": FluidPool(Role.PREFILL, performance=performance),
            "d": FluidPool(Role.DECODE, performance=performance),
        },
        {"p": 1, "d": 1},
        {"": lambda t: 8.0 if t < 400 else 15.0 if t < 800 else 25.0},
        TIMES,
        mix=lambda t, model: RequestMix(3000, 150),
    )
    fleet.run(planner, 790)
    assert fleet.counts == {"p": 1, "d": 1}
    fleet.run(planner, 1300)
    assert fleet.counts == {"p": 2, "d": 1}


def oscillating(consolidation: bool) -> list[int]:
    """V1: ITL(N) = 5 + 36 / N ms at constant load; objective 40 ms."""
    performance = PerformanceModel(
        PrefillLine(0.001, 0.0), DecodeLaw(LatencyLaw(0.0005, 0.005)), kv_tokens=1e9
    )
    setup = PlannerSetup(
        slo=Slo(ttft_s=10.0, itl_s=0.04),
        budget=Budget(min_workers=1, max_gpus=8),
        performance={"d": performance},
    )
    planner = load("dynamo", setup, {"predictive_interval_s": 0, "consolidation": consolidation})
    count, counts = 2, []
    for step in range(12):
        streams = 72 // count
        own = workers(
            count, running=streams, waiting=0, held_tokens=streams * 100.0,
            mean_running=float(streams), mean_held_tokens=streams * 100.0,
            itl_s=0.005 + 0.0005 * streams,
        )  # fmt: skip
        planner.observe(
            window(5.0 * step, pool(Role.DECODE, *own), isl=50.0, osl=100.0, arrivals=9)
        )
        for action in planner.tick(int(5.0 * step * SECOND)).actions:
            count += action.count if isinstance(action, AddWorkers) else -1
        counts.append(count)
    return counts


def test_the_flat_rule_oscillates_under_constant_load() -> None:
    """PR 9294: 23 < 32 -> 1; 41 > 40 -> 2; for ever."""
    assert oscillating(consolidation=False) == [1, 2] * 6


def test_the_consolidation_rule_holds() -> None:
    assert oscillating(consolidation=True) == [2] * 12


def test_one_hot_engine_never_triggers() -> None:
    own = (*workers(3, queued_prefill_tokens=0.0), WorkerWindow(id="h", queued_prefill_tokens=1e6))
    planner = load("dynamo", SETUP, {"predictive_interval_s": 0})
    planner.observe(window(5, pool(Role.PREFILL, *own, name="p"), isl=3000.0, arrivals=1))
    assert planner.tick(5 * SECOND).actions == ()


def test_the_first_load_planner_moves_by_one_and_waits_for_its_grace() -> None:
    planner = load("dynamo-load", SETUP)
    count, counts = 1, []
    for step in range(1, 9):
        usage = 0.95 if step == 1 else 0.1
        planner.observe(window(30.0 * step, pool(Role.DECODE, *workers(count, kv_usage=usage))))
        for action in planner.tick(30 * step * SECOND).actions:
            count += 1 if isinstance(action, AddWorkers) else -1
        counts.append(count)
    assert counts == [2, 2, 2, 2, 1, 1, 1, 1]


def test_a_falling_prefill_queue_holds_an_addition_back() -> None:
    for queues, added in (((9, 9, 9), True), ((30, 20, 9), False)):
        planner = load("dynamo-load", SETUP, {"adjustment_interval_s": 30})
        for step, queue in enumerate(queues, start=1):
            seen = window(
                10.0 * step, pool(Role.PREFILL, *workers(1, waiting=queue), name="p"), seconds=10.0
            )
            planner.observe(seen)
        assert bool(planner.tick(30 * SECOND).actions) is added


def test_queueing_never_adds_prefill_in_the_sla_planner() -> None:
    planner = load("dynamo-sla", SETUP, {"predictor": "last-value"})
    counts = []
    for ttft in (0.25, 25.0):
        slow = LoadWindow(arrivals=360, isl=3000.0, osl=300.0, request_s=5.0)
        planner = load("dynamo-sla", SETUP, {"predictor": "last-value"})
        planner.tick(0)
        slow = msgspec.structs.replace(slow, ttft=LatencySummary(mean=ttft))
        seen = PlannerWindow(
            now_ns=180 * SECOND, seconds=180.0, loads=(slow,),
            pools=(pool(Role.PREFILL, *workers(1), name="p"), pool(Role.DECODE, *workers(1))),
        )  # fmt: skip
        planner.observe(seen)
        counts.append([plan.wanted for plan in planner.tick(180 * SECOND).pools])
    assert counts[0] == counts[1]


# --- the others -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "ratio", "desired"),
    [(4, 1.05, 4), (4, 1.5, 6), (4, 5.0, 8), (4, 0.95, 4), (4, 0.7, 3), (4, 0.1, 2), (5, 0.1, 2)],
)
def test_apa(count: int, ratio: float, desired: int) -> None:
    assert apa_desired(count, ratio, ApaParams()) == desired


def test_kpa_panics_and_never_scales_down_at_zero() -> None:
    """AIBrix 593, 1159: a stable value of 0 is panic, in which the number never falls."""
    planner = load("kpa", SETUP, {"down_delay_s": 0, "stable_window_s": 60, "panic_window_s": 10})
    wanted = []
    for step in range(1, 40):
        usage = 0.9 if step == 1 else 0.0
        planner.observe(
            window(10.0 * step, pool(Role.BOTH, *workers(4, kv_usage=usage)), seconds=10.0)
        )
        wanted.append(planner.tick(10 * step * SECOND).pools[0].wanted)
    assert wanted[0] == 8  # 4 x 0.9 / 0.5, at most twice as many
    assert wanted[-1] == 8


@pytest.mark.parametrize(
    ("held", "waiting", "starting", "wanted"),
    [
        # capacity .8 x 10,000; demand = held + waiting x 500
        (4000.0, 0, 0, 2), (7600.0, 0, 0, 3), (7600.0, 0, 1, 3), (1000.0, 0, 0, 1),
        (8000.0, 4, 0, 3),
    ],
)  # fmt: skip
def test_wva_counts_pending_workers_as_supply(
    held: float, waiting: int, starting: int, wanted: int
) -> None:
    planner = load("wva", SETUP)
    own = workers(2, kv_tokens=10_000, held_tokens=held, waiting=waiting)
    pending = tuple(WorkerWindow(id=f"s{n}", state=WorkerState.STARTING) for n in range(starting))
    planner.observe(window(9, pool(Role.BOTH, *own, *pending), isl=500.0, osl=100.0, queued=0))
    assert planner.tick(9 * SECOND).pools[0].wanted == wanted


def test_wva_takes_what_a_full_worker_held_as_capacity() -> None:
    planner = load("wva", SETUP)
    own = workers(1, kv_tokens=10_000, held_tokens=3000.0, waiting=5)
    planner.observe(window(9, pool(Role.BOTH, *own), isl=100.0, osl=50.0))
    # demand 3,500, capacity 3,000: need 3,500 / .85 - 3,000 -> one more
    assert planner.tick(9 * SECOND).pools[0].wanted == 2


def test_ray_waits_for_its_delays() -> None:
    planner = load("ray", SETUP)
    wanted = []
    for step in range(1, 80):
        ongoing = 8 if step < 10 else 0
        own = pool(Role.BOTH, *workers(2, running=ongoing // 2, waiting=0))
        planner.observe(window(10.0 * step, own, seconds=10.0))
        wanted.append(planner.tick(10 * step * SECOND).pools[0].wanted)
    assert wanted[2] == 2
    assert wanted[3] == 4  # 8 / (2 x 2) for 30 s
    down = next(n for n, count in enumerate(wanted) if count < 2)
    assert down - 10 >= 60  # 600 s
    with pytest.raises(ConfigError, match="above 0"):
        load("ray", SETUP, {"target_ongoing_requests": 0})


def test_hpa_holds_within_its_tolerance_and_takes_the_largest_of_its_window() -> None:
    planner = load("hpa-qps", SETUP, {"target": 2.0})
    wanted = []
    for step in range(1, 40):
        arrivals = 63 if step == 1 else 120 if step == 2 else 15
        own = pool(Role.BOTH, *workers(2))
        planner.observe(window(15.0 * step, own, seconds=15.0, arrivals=arrivals))
        wanted.append(planner.tick(15 * step * SECOND).pools[0].wanted)
    assert wanted[:2] == [2, 4]
    assert wanted[20] == 2
    assert wanted[-1] == 1


def test_hpa_on_cpu_fills_holes_conservatively() -> None:
    planner = load("hpa-cpu", SETUP)
    hot = (WorkerWindow(id="a", cpu_usage=0.96), WorkerWindow(id="b"))
    planner.observe(window(15, pool(Role.BOTH, *hot)))
    assert planner.tick(15 * SECOND).pools[0].wanted == 2
    planner.observe(window(30, pool(Role.BOTH, *workers(2, cpu_usage=1.6))))
    assert planner.tick(30 * SECOND).pools[0].wanted == 4
    planner.observe(window(45, pool(Role.BOTH, *workers(2))))
    assert planner.tick(45 * SECOND).pools[0].wanted == 2


def test_heteroscale_moves_both_pools_by_decode_tokens() -> None:
    planner = load("heteroscale", SETUP, {"target": 100.0})
    pools = (pool(Role.PREFILL, *workers(1), name="p"), pool(Role.DECODE, *workers(2)))
    planner.observe(window(60, *pools, seconds=60.0, output_tokens=30_000.0))
    assert [plan.wanted for plan in planner.tick(60 * SECOND).pools] == [3, 5]
    own = load("heteroscale", SETUP)
    own.observe(window(60, *pools, seconds=60.0, output_tokens=3e6, isl=3000.0, osl=300.0))
    assert own.tick(60 * SECOND).pools[1].wanted > 2  # by the performance model


def test_static_starts_again_what_failed() -> None:
    planner = load("static", SETUP)
    planner.observe(window(5, pool(Role.BOTH, *workers(3))))
    assert planner.tick(5 * SECOND).actions == ()
    planner.observe(window(10, pool(Role.BOTH, *workers(2))))
    assert planner.tick(10 * SECOND).actions == (AddWorkers("d", 1),)
    none = load("static", SETUP, {"repair": False})
    none.observe(window(5, pool(Role.BOTH)))
    assert none.tick(5 * SECOND).actions == ()
