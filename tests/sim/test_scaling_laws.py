"""Laws of any planner in the loop: no request is lost, limits hold, times add up."""

from __future__ import annotations

import math
from importlib.metadata import entry_points
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.config import ControlConfig
from pigou.control.planner.messages import (
    Action,
    AddWorkers,
    DrainWorker,
    FlipRole,
    PlannerDecision,
    RemoveWorker,
)
from pigou.request import SECOND, Role
from pigou.sim.arrival_rate import RateSchedule
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import (
    FleetConfig,
    RoleFlipConfig,
    ScalingConfig,
    StartUpConfig,
    WorkerGroup,
)
from pigou.sim.request_run import RunOutcome
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.virtual_clock import EPOCH
from pigou.sim.workload import RequestLengths, renewal
from pigou.windows.planner_window import PlannerWindow

LAW = "law:itl_a=0.008,itl_b=0.0003,prefill=0.004,prefill_token=0.00005"
LENGTHS = RequestLengths(input=(200, 400), output=(20, 60), templates=3)
LOAD = RateSchedule(seconds=(0.0, 4.0, 8.0), rates=(10.0, 60.0, 10.0))
NAMES = [f"{role}-{number}" for role in ("prefill", "decode", "both") for number in range(7)]
POOLS = ["prefill", "decode", "both", "nowhere"]
ACTIONS = st.one_of(
    st.builds(AddWorkers, st.sampled_from(POOLS), st.integers(1, 4)),
    st.builds(DrainWorker, st.sampled_from(NAMES)),
    st.builds(RemoveWorker, st.sampled_from(NAMES)),
    st.builds(
        FlipRole, st.sampled_from(NAMES), st.sampled_from(list(Role)), st.sampled_from(POOLS)
    ),
)


class Empty(msgspec.Struct, frozen=True):
    """No parameters."""


class Careless:
    """Does what it was told, whatever it sees."""

    name: ClassVar[str] = "careless"
    Params: ClassVar[type[msgspec.Struct]] = Empty

    def __init__(self, rounds: list[tuple[Action, ...]]) -> None:
        self.rounds = iter(rounds)
        self.sizes: list[int] = []

    def observe(self, window: PlannerWindow) -> None:
        self.sizes.append(sum(len(pool.workers) for pool in window.pools))

    def tick(self, now_ns: int) -> PlannerDecision:
        return PlannerDecision(now_ns=now_ns, planner=self.name, actions=next(self.rounds, ()))


def simulate(fleet: FleetConfig, scaling: ScalingConfig, planner: Any = None) -> Simulation:
    return Simulation(
        renewal(LENGTHS, LOAD, 1.0, 0, 12.0, 1), fleet,
        Setup(timing=LAW, blocks=400, max_seqs=16, max_batched_tokens=256),
        ControlConfig(max_inflight=UNLIMITED, max_inflight_tokens=UNLIMITED,
                      queue_timeout=UNLIMITED, max_queued=UNLIMITED),
        ClientConfig(), scaling=scaling, planner=planner,
    )  # fmt: skip


def check(made: Simulation, limit: int) -> dict[str, Any]:
    """Run; check the laws; return the planner's figures."""
    result = made.run()
    made.fleet.check()
    assert {request.outcome for request in result.runs} == {RunOutcome.DONE}
    figures: dict[str, Any] = result.document()["planner"]
    assert figures["peak_workers"] <= limit
    for entry in figures["replicas"]:
        assert sum(sum(counts.values()) for counts in entry["pools"].values()) <= limit
    span_s = (made.clock.now - EPOCH) / SECOND
    assert 0 < figures["gpu_hours"] * 3600 <= limit * span_s * (1 + 1e-9)
    parts = [hours for times in figures["gpu_hours_by_role"].values() for hours in times.values()]
    assert sum(parts) == pytest.approx(figures["gpu_hours"])
    assert all(math.isfinite(figures[name]) for name in ("settle_s", "moves", "reversals"))
    return figures


@settings(max_examples=examples(20), suppress_health_check=list(HealthCheck))
@given(
    rounds=st.lists(st.lists(ACTIONS, max_size=4).map(tuple), max_size=24),
    split=st.booleans(),
    flip=st.builds(
        RoleFlipConfig, drains=st.booleans(), keeps_cache=st.booleans(),
        seconds=st.sampled_from([0.0, 0.4]),
    ),
    start=st.builds(
        StartUpConfig, seconds=st.sampled_from([0.3, 1.0]), cv=st.sampled_from([0.0, 1.0]),
        failures=st.sampled_from([0.0, 0.5]), warm_up_s=st.sampled_from([0.0, 1.0]),
        warm_up_factor=st.just(2.0), losses_per_hour=st.sampled_from([0.0, 600.0]),
    ),
    drain_s=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
def test_a_careless_planner_loses_nothing_and_exceeds_nothing(
    rounds: list[tuple[Action, ...]],
    split: bool,
    flip: RoleFlipConfig,
    start: StartUpConfig,
    drain_s: float,
) -> None:
    groups = (
        (WorkerGroup(role=Role.PREFILL, count=2), WorkerGroup(role=Role.DECODE, count=2))
        if split
        else (WorkerGroup(count=2),)
    )
    fleet = FleetConfig(workers=groups, flip=flip, start_up=start, drain_s=drain_s)
    planner = Careless(rounds)
    scaling = ScalingConfig(planner={"planner": "x"}, max_workers=6, interval_s=0.5, slo="ttft=1")
    check(simulate(fleet, scaling, planner), 6)
    assert max(planner.sizes, default=0) <= 6


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", sorted(entry_points(group="pigou.planner").names))
def test_every_planner_runs_in_the_loop(name: str, split: bool) -> None:
    groups = (
        (WorkerGroup(role=Role.PREFILL), WorkerGroup(role=Role.DECODE))
        if split
        else (WorkerGroup(),)
    )
    fleet = FleetConfig(workers=groups, start_up=StartUpConfig(seconds=1.0))
    scaling = ScalingConfig(
        planner={"planner": name}, max_workers=5, interval_s=1.0, slo="ttft=0.3,itl=0.02"
    )
    figures = check(simulate(fleet, scaling), 5)
    assert figures["name"] == name
    if name == "static":
        assert figures["moves"] == 0
