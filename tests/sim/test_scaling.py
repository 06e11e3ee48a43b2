"""A planner in the loop of a simulation: what it sees, what is done, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import pytest
from setups import figures, simulation

from pigou.config import ConfigError, ControlConfig
from pigou.control.planner.config import RequestClassConfig
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
from pigou.objectives import Objectives
from pigou.request import SECOND, Role
from pigou.sim.arrival_rate import RateSchedule
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import (
    FleetConfig,
    ScalingConfig,
    StartUpConfig,
    WorkerGroup,
    read_fleet,
)
from pigou.sim.membership import MembershipChange
from pigou.sim.request_run import RunOutcome
from pigou.sim.scaling import OfferedRate, ScalingMove, reversals, settle_seconds
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.virtual_clock import EPOCH
from pigou.sim.workload import OpenLoop, RequestLengths, RequestSession, renewal
from pigou.windows.planner_window import PlannerWindow, WorkerState

LAW = "law:itl_a=0.008,itl_b=0.0003,prefill=0.004,prefill_token=0.00005"
LENGTHS = RequestLengths(input=(200, 400), output=(20, 60))
Rule = Callable[[PlannerWindow], tuple[Action, ...]]


class NoParams(msgspec.Struct, frozen=True):
    """None."""


class RulePlanner:
    """Decides by a function of the window; keeps the windows."""

    name: ClassVar[str] = "rule"
    Params: ClassVar[type[msgspec.Struct]] = NoParams

    def __init__(self, rule: Rule = lambda _: ()) -> None:
        self.rule = rule
        self.windows: list[PlannerWindow] = []

    def observe(self, window: PlannerWindow) -> None:
        self.windows.append(window)

    def tick(self, now_ns: int) -> PlannerDecision:
        actions = self.rule(self.windows[-1])
        return PlannerDecision(
            now_ns=now_ns, planner=self.name, actions=actions, reasons=("by rule",)
        )


def load(rate: str | float = 20.0, seconds: float = 20.0, seed: int = 1) -> OpenLoop:
    schedule = RateSchedule.of(rate) if isinstance(rate, float) else None
    if schedule is None:
        pieces = [part.split("@") for part in str(rate).split("/")]
        schedule = RateSchedule(
            seconds=tuple(float(second) for _, second in pieces),
            rates=tuple(float(r) for r, _ in pieces),
        )
    return renewal(LENGTHS, schedule, 1.0, 0, seconds, seed)


def planned(
    rule: Rule = lambda _: (), *, workload: OpenLoop | None = None,
    fleet: str | FleetConfig = "1xboth", seed: int = 0, planner: RulePlanner | None = None,
    stepwise: bool = False, **options: Any,
) -> Simulation:  # fmt: skip
    """A simulation with a planner that decides by a rule, every second."""
    options = {"start_up": 2.0, "interval_s": 1.0, "planner": {"planner": "rule"}} | options
    return Simulation(
        workload or load(),
        read_fleet(fleet) if isinstance(fleet, str) else fleet,
        Setup(timing=LAW, blocks=400, max_seqs=16, max_batched_tokens=256),
        ControlConfig(policy="least-loaded", max_inflight=UNLIMITED, max_inflight_tokens=UNLIMITED,
                      queue_timeout=UNLIMITED, max_queued=UNLIMITED),
        ClientConfig(), seed=seed, stepwise=stepwise, scaling=ScalingConfig(**options),
        planner=planner or RulePlanner(rule),
    )  # fmt: skip


def run(made: Simulation) -> dict[str, Any]:
    """Run; return the planner's figures. No request may be lost, nor a law broken."""
    result = made.run()
    made.fleet.check()
    assert {request.outcome for request in result.runs} == {RunOutcome.DONE}
    document: dict[str, Any] = result.document()["planner"]
    return document


def at(second: float, *actions: Action) -> Rule:
    """Decide these actions once, at a second."""
    now = EPOCH + round(second * SECOND)
    return lambda window: actions if window.now_ns == now else ()


def test_figures_have_the_keys_that_other_programs_read() -> None:
    made = planned(at(3, AddWorkers("both", 1)), slo="ttft=0.5,itl=0.05")
    document = made.run().document()
    assert list(document["planner"])[:6] == [
        "name", "gpu_hours", "moves", "reversals", "settle_s", "peak_workers",
    ]  # fmt: skip
    assert set(document["slo"]) == {"ttft_s", "itl_s", "percentile", "attained"}
    assert 0.0 < document["slo"]["attained"] <= 1.0
    (decision,) = document["planner"]["decisions"]
    assert decision == {
        "at_s": 3.0, "actions": [{"kind": "add_workers", "pool": "both", "count": 1}],
        "reasons": ["by rule"],
    }  # fmt: skip


def test_a_planner_that_does_nothing_changes_nothing() -> None:
    with_planner = planned().run().document()
    plain = simulation(
        load(), "1xboth", setup={"blocks": 400, "max_batched_tokens": 256},
        control={"queue_timeout": UNLIMITED, "max_queued": UNLIMITED},
    ).run()  # fmt: skip
    document = plain.document()
    assert "planner" not in document
    assert "slo" not in document
    for other in ("wall_s", "peak_rss_mb", "planner"):
        document.pop(other, None)
        with_planner.pop(other)
    assert document == with_planner


def test_a_flood_of_one_tenant_buys_no_more_than_its_share_of_max_workers() -> None:
    def decided(*tenants: str) -> dict[str, Any]:
        sessions = [
            RequestSession(session.start_ns, tuple(
                replace(spec, tenant=tenants[number % len(tenants)]) for spec in session.requests
            ))
            for number, session in enumerate(load(seconds=10.0).sessions)
        ]  # fmt: skip
        rule = at(6, AddWorkers("both", 7))
        return run(planned(rule, workload=OpenLoop(sessions), max_workers=8))

    flood = decided(*["flood"] * 19, "quiet")
    assert flood["peak_workers"] == 5  # half of eight, and one for the other's part
    assert "shares of it allow 5" in flood["decisions"][0]["refused"][0]
    assert decided("flood")["peak_workers"] == 8  # alone, it has all


def test_gpu_hours_are_the_integral_of_the_workers() -> None:
    made = planned(at(3, AddWorkers("both", 2)), start_up=2.0)
    figures_ = run(made)
    seconds = (made.clock.now - EPOCH) / SECOND
    assert figures_["gpu_hours"] * 3600 == pytest.approx(seconds + 2 * (seconds - 3))
    assert figures_["gpu_hours_by_role"]["both"]["starting"] * 3600 == pytest.approx(4.0)
    assert figures_["peak_workers"] == 3
    assert [(each["at_s"], *each["pools"]["both"].values()) for each in figures_["replicas"]] == [
        (0.0, 0, 1, 0), (3.0, 2, 1, 0), (5.0, 0, 3, 0),
    ]  # fmt: skip
    assert (figures_["moves"], figures_["reversals"]) == (2, 0)
    assert figures_["settle_s"] == pytest.approx(5.0)


def test_a_fleet_that_begins_above_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_workers is 2, and the fleet begins with 3"):
        planned(fleet="3xboth", max_workers=2)


def test_a_greedy_planner_never_exceeds_the_limit() -> None:
    sizes = []

    def greedy(window: PlannerWindow) -> tuple[Action, ...]:
        sizes.append(len(window.pools[0].workers))
        return (AddWorkers("both", 3),)

    made = planned(greedy, max_workers=4)
    figures_ = run(made)
    assert max(sizes) == figures_["peak_workers"] == 4
    assert figures_["decisions"][-1]["refused"] == ["both: 3 workers more than max_workers allows"]
    assert figures_["moves"] == 3


def test_draining_workers_count_until_they_are_gone() -> None:
    def swap(window: PlannerWindow) -> tuple[Action, ...]:
        ready = window.pools[0].in_state(WorkerState.READY)
        assert len(window.pools[0].workers) <= 3
        return (DrainWorker(ready[0].id), AddWorkers("both", 1))

    figures_ = run(planned(swap, fleet="2xboth", max_workers=3, workload=load(40.0, 12.0)))
    assert figures_["peak_workers"] == 3
    assert figures_["moves"] > 5


def test_the_last_worker_that_decodes_is_left() -> None:
    def shrink(window: PlannerWindow) -> tuple[Action, ...]:
        workers = [w for pool in window.pools for w in pool.workers]
        return (*(DrainWorker(w.id) for w in workers), *(RemoveWorker(w.id) for w in workers),
                *(FlipRole(w.id, Role.PREFILL, "prefill") for w in workers))  # fmt: skip

    made = planned(shrink, fleet="2p+3d")
    figures_ = run(made)
    names = {w.name for w in made.fleet.workers if w.state is not None}
    assert len(names) == 1
    assert names.pop().startswith("decode")
    reasons = {reason for entry in figures_["decisions"] for reason in entry["refused"]}
    assert any("is the last worker that decodes" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (AddWorkers("prefill", 1), "there is no pool 'prefill'"),
        (DrainWorker("nobody"), "nobody is not ready"),
        (RemoveWorker("nobody"), "nobody is not there"),
        (FlipRole("nobody", Role.PREFILL, "prefill"), "nobody is not ready"),
        (FlipRole("both-0", Role.PREFILL, "prefill"), "both-0 cannot serve in pool 'prefill'"),
        (
            SetOperatingPoint(pool="both", max_seqs=0),
            "both: max_seqs is 0; it must be at least 1",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(action: Action, reason: str) -> None:
    figures_ = run(planned(at(3, action), workload=load(seconds=5.0)))
    assert figures_["decisions"][0]["refused"] == [reason]
    assert figures_["moves"] == 0


def test_advice_to_rebalance_moves_nothing() -> None:
    figures_ = run(planned(at(3, RebalancePool("both", "both-0")), workload=load(seconds=5.0)))
    assert "refused" not in figures_["decisions"][0]
    assert figures_["moves"] == 0


def test_a_flip_moves_a_worker_from_pool_to_pool() -> None:
    made = planned(at(3, FlipRole("decode-2", Role.PREFILL, "prefill")), fleet="1p+3d")
    figures_ = run(made)
    assert figures_["moves"] == 2
    pools = {pool: len(made.membership.members(pool)) for pool in made.membership.pools}
    assert pools == {"prefill": 2, "decode": 2}
    hours = figures_["gpu_hours_by_role"]
    span_s = (made.clock.now - EPOCH) / SECOND
    assert sum(sum(times.values()) for times in hours.values()) * 3600 == pytest.approx(4 * span_s)
    assert hours["prefill"]["active"] * 3600 > span_s


def test_windows_add_up_to_the_run() -> None:
    planner = RulePlanner(at(5, AddWorkers("both", 1)))
    made = planned(planner=planner, workload=load("10@0/40@10", 20.0), slo="ttft=0.2,itl=0.02")
    run(made)
    runs, loads = made.client.runs, [window.loads[0] for window in planner.windows]
    last_ns = planner.windows[-1].now_ns
    assert sum(one.arrivals or 0 for one in loads) == sum(r.intended_ns <= last_ns for r in runs)
    ended = [r for r in runs if r.ended_ns <= last_ns]
    assert sum(one.completed or 0 for one in loads) == len(ended)
    tokens = sum(one.output_tokens or 0.0 for one in loads)
    assert tokens == pytest.approx(sum(r.output_tokens for r in ended), rel=0.05)
    for before, after in zip(planner.windows, planner.windows[1:], strict=False):
        assert after.now_ns - before.now_ns == SECOND
        assert after.seconds == 1.0
    rates = [one.arrivals for one in loads]
    assert sum(rates[:10]) < 150  # type: ignore[arg-type]
    assert sum(rates[10:]) > 300  # type: ignore[arg-type]


def test_a_window_shows_what_workers_do() -> None:
    planner = RulePlanner()
    made = planned(planner=planner, fleet="1p+2d", workload=load(20.0, 20.0), slo="ttft=0.2")
    run(made)
    windows = planner.windows[2:18]
    loads = [window.loads[0] for window in windows]
    assert all(one.isl is not None and 250 < one.isl < 350 for one in loads)
    assert all(one.osl is not None and 25 < one.osl < 55 for one in loads)
    assert all(one.ttft.mean is not None and 0.004 < one.ttft.mean < 1.0 for one in loads)
    assert all(one.itl.p50 is not None and 0.008 < one.itl.p50 < 0.03 for one in loads)
    assert all((one.attained or 0) <= (one.completed or 0) for one in loads)
    for window in windows:
        (prefill, decode) = window.pools
        assert (prefill.ready, decode.ready) == (1, 2)
        (one,) = prefill.workers
        assert one.itl_s is None
        assert one.computed_prompts is not None
        assert 5 < one.computed_prompts < 40
        assert one.computed_tokens is not None
        assert one.prefill_s is not None
        # 4 ms a step, and 50 us a token.
        tokens_s = one.computed_tokens * 50e-6
        assert tokens_s * 0.8 < one.prefill_s < tokens_s * 1.2 + 0.004 * 60
        for worker in decode.workers:
            assert worker.itl_s is not None
            assert 0.008 < worker.itl_s < 0.02
            assert worker.mean_running is not None
            assert 0.0 <= worker.mean_running <= 16


def test_the_same_seed_gives_the_same_run() -> None:
    def rule(window: PlannerWindow) -> tuple[Action, ...]:
        pool = window.pools[-1]
        if (window.loads[0].in_flight or 0) > 10:
            return (AddWorkers(pool.name, 1),)
        ready = pool.in_state(WorkerState.READY)
        return (DrainWorker(ready[-1].id),) if len(ready) > 1 else ()

    def text(seed: int, stepwise: bool = False) -> str:
        fleet = FleetConfig(
            workers=(WorkerGroup(),), start_up=StartUpConfig(cv=0.5, failures=0.2, seconds=1.0)
        )
        return figures(
            planned(rule, workload=load("10@0/60@3/5@6", 10.0), fleet=fleet, seed=seed,
                    max_workers=5, stepwise=stepwise, start_up=None).run()
        )  # fmt: skip

    assert text(3) == text(3) == text(3, stepwise=True)
    assert text(3) != text(4)


def test_classes_have_objectives_windows_and_shares_of_their_own() -> None:
    planner = RulePlanner()
    made = planned(
        planner=planner, fleet="2xboth", slo="ttft=0.0001",
        classes=(
            RequestClassConfig(name="short", ttft=5.0, itl=1.0, max_prompt_tokens=300),
            RequestClassConfig(name="nobody", ttft=1.0, key="nobody"),
        ),
    )  # fmt: skip
    document = made.run().document()["slo"]
    runs = made.client.runs
    short = sum(run.spec.prompt_tokens <= 300 for run in runs)
    assert document["classes"]["short"]["offered"] == short > 50
    assert document["classes"]["short"]["attained"] == 1.0
    assert document["classes"]["nobody"] == {
        "ttft_s": 1.0, "itl_s": None, "percentile": 95.0, "offered": 0, "attained": 1.0,
    }  # fmt: skip
    assert document["attained"] == short / len(runs)  # nobody else keeps a tenth of a millisecond
    last_ns = planner.windows[-1].now_ns
    arrivals = {
        name: sum(one.arrivals or 0 for w in planner.windows for one in w.loads
                  if one.workload == name)
        for name in ("short", "nobody", "")
    }  # fmt: skip
    offered = [run for run in runs if run.intended_ns <= last_ns]
    assert arrivals["short"] == sum(run.spec.prompt_tokens <= 300 for run in offered)
    assert arrivals["nobody"] == 0
    assert sum(arrivals.values()) == len(offered)
    isl = [one.isl for w in planner.windows for one in w.loads if one.workload == "short"]
    assert all(200 <= each <= 300 for each in isl if each is not None)


def test_attainment_counts_all_offered_requests() -> None:
    made = simulation(load(60.0, 3.0), "1xboth", client=ClientConfig(timeout=1.5))
    made.objectives = Objectives(ScalingConfig(slo="ttft=0.4,itl=0.05,percentile=90").objective)
    result = made.run()
    document = result.document()
    assert document["failed"] > 0
    inside = sum(
        request.first_token_ns - request.intended_ns <= 0.4 * SECOND
        and (request.output_tokens < 2 or (request.last_token_ns - request.first_token_ns)
             <= 0.05 * SECOND * (request.output_tokens - 1))
        for request in result.done
    )  # fmt: skip
    assert document["slo"] == {
        "ttft_s": 0.4, "itl_s": 0.05, "percentile": 90.0, "attained": inside / document["offered"],
    }  # fmt: skip
    assert 0 < inside < len(result.done)


class Offered(OfferedRate):
    """A load that is known."""

    def __init__(self, *rates: float) -> None:
        self._rates = rates

    def at(self, now: int) -> tuple[float, ...]:
        return (self._rates[now],)


class Mixed(OfferedRate):
    """Two parts; the second takes over from the first at 2."""

    def __init__(self) -> None:
        pass

    def at(self, now: int) -> tuple[float, ...]:
        return (5.0, 0.0) if now < 2 else (0.0, 5.0)


@pytest.mark.parametrize(
    ("rates", "signs", "count"),
    [
        ((5.0, 5.0, 5.0, 5.0), (1, -1, 1, -1), 3),  # the oscillation of a constant load
        ((5.0, 5.0, 5.2, 5.0), (1, 1, 1, -1), 1),  # within the deadband
        ((5.0, 15.0, 15.0, 2.0), (1, 1, 1, -1), 0),
        ((5.0, 15.0, 15.0, 2.0), (1, 1, -1, -1), 1),  # it started one too many
        ((5.0, 2.0, 2.0, 6.0), (-1, -1, -1, 1), 0),
    ],
)
def test_reversals_are_moves_that_the_load_does_not_explain(
    rates: tuple[float, ...], signs: tuple[int, ...], count: int
) -> None:
    moves = [ScalingMove(n, f"w{n}", "both", sign) for n, sign in enumerate(signs)]
    assert reversals(moves, Offered(*rates)) == count
    apart = [move._replace(pool=str(n)) for n, move in enumerate(moves)]
    assert reversals(apart, Offered(*rates)) == 0


def test_another_mix_of_requests_explains_a_move_too() -> None:
    moves = [ScalingMove(n, f"w{n}", "both", sign) for n, sign in enumerate((1, -1, 1, -1))]
    assert reversals(moves, Mixed()) == 2  # the first and the last


def test_the_fleet_rests_when_its_last_worker_serves_or_is_gone() -> None:
    moves = [ScalingMove(10, "a", "p", 1), ScalingMove(30, "b", "p", 1),
             ScalingMove(110, "c", "p", -1)]  # fmt: skip
    changes = [
        MembershipChange(10, "a", "p", WorkerState.STARTING),
        MembershipChange(25, "a", "p", WorkerState.READY),
        MembershipChange(30, "b", "p", WorkerState.STARTING),
        MembershipChange(70, "b", "p", WorkerState.READY),
        MembershipChange(110, "c", "p", WorkerState.DRAINING),
    ]
    assert settle_seconds(moves, changes, (0, 100), 150) * SECOND == pytest.approx(70)
    assert settle_seconds(moves[2:], changes, (0, 100), 150) * SECOND == pytest.approx(50)
    assert settle_seconds([], changes, (0, 100), 150) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_workers": 5}, "max_workers is 5, and no planner"),
        ({"start_up": 5.0}, "start_up is 5.0, and no planner"),
        ({"planner": {"planner": "price"}, "max_workers": -1}, "max_workers is -1"),
        ({"planner": {"planner": "price"}, "start_up": -1.0}, "start_up is -1.0"),
        ({"interval_s": 0.0}, "interval_s is 0.0; it must be 0.1 to"),
        ({"classes": (RequestClassConfig(name="a"),) * 2}, "classes are named a, a"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScalingConfig(**options)


@pytest.mark.parametrize(
    "values", [{"ttft": 0.0}, {"percentile": 100.0}, {"weight": 0.0}, {"min_prompt_tokens": -1}]
)
def test_classes_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="class a: "):
        RequestClassConfig(name="a", **values)


@pytest.mark.parametrize("text", ["ttft", "ttft=-1", "ttft=0.5,itl=x", "speed=3", "percentile=100"])
def test_objectives_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="slo"):
        _ = ScalingConfig(slo=text).objective
