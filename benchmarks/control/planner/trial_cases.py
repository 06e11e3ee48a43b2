"""Workloads and fleets of the planner trials: those that choose constants, and those that judge.

The split was written down before the first run. Constants of `price` are chosen on `choosing()`
alone (seeds 1, 2, ...). `judging()` has loads of other rates, shapes and lengths, other windows of
the traces, seeds from 101 on and a fleet that the choosing side lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.control.planner.clairvoyant import ForeseenPool, Foresight, fewest_workers
from benchmarks.control.planner.planner_loads import (
    Demand,
    LoadPart,
    PlannerLoad,
    pieces,
    ramp,
    wave,
)
from benchmarks.routing.policy_workloads import AZURE, MOONCAKE
from pigou.config import ControlConfig
from pigou.control.planner.planner import Planner
from pigou.objectives import Slo
from pigou.request import Role
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import FleetConfig, ScalingConfig, WorkerGroup
from pigou.sim.pool_performance import measure_performance
from pigou.sim.setup import Setup
from pigou.sim.simulation import UNLIMITED, Simulation
from pigou.sim.workload import OpenLoop, RequestLengths
from pigou_lab.model_fleets import ModelFleet, ModelFleets

START_UP_S = 100.0
FIRST_JUDGING_SEED = 101
#: Seconds after which a client gives a request up.
PATIENCE_S = 60.0
#: Steps at the start of a run whose load the initial fleet is sized for.
_FIRST_STEPS = 6
_CHAT = RequestLengths(input=(4000, 12000), output=(100, 300))
_JUDGED = RequestLengths(input=(5000, 15000), output=(80, 240))
_LONG = RequestLengths(input=(8000, 16000), output=(50, 150))
_WORDY = RequestLengths(input=(500, 1500), output=(400, 1000))
_SLO = "ttft=4,itl=0.04"
#: Objective of Mooncake's prompts, which are longer.
_MOONCAKE_SLO = "ttft=10,itl=0.06"


@dataclass(frozen=True)
class TrialFleet:
    """What serves."""

    name: str
    roles: tuple[Role, ...]
    setups: tuple[Setup, ...]
    factor: float = 1.0
    max_workers: int = 12


_QWEN = Setup(model="qwen3-32b", gpu="H200")
_LLAMA = Setup(model="llama-3.1-70b", gpu="H200", tp=2)
AGGREGATED = TrialFleet("both 32b", (Role.BOTH,), (_QWEN, _LLAMA))
SEPARATE = TrialFleet("p+d 32b", (Role.PREFILL, Role.DECODE), (_QWEN, _LLAMA))
WIDE = TrialFleet("p+d 70b tp=2", (Role.PREFILL, Role.DECODE), (_LLAMA, _QWEN), 0.9)


@dataclass(frozen=True)
class Trial:
    """A workload on a fleet."""

    workload: str
    fleet: TrialFleet
    loads: tuple[PlannerLoad, ...] = field(repr=False)
    slo: str = _SLO

    @property
    def name(self) -> str:
        """Name of workload and fleet."""
        return f"{self.workload}, {self.fleet.name}"

    @property
    def has_prefixes(self) -> bool:
        """Whether prompts share beginnings; where they do not, caching would only take time."""
        return self.workload == "mooncake"

    def draw(self, traces: Path, seed: int) -> DrawnTrial:
        """Return the trial with a seed's requests."""
        factor = self.fleet.factor
        models = []
        for number, load in enumerate(self.loads):
            loop = load.scaled(factor).draw(traces, seed + 50 * number)
            models.append(DrawnModel(self, number, loop, load.scaled(factor).demand(loop)))
        return DrawnTrial(self, seed, tuple(models))


@dataclass(frozen=True)
class DrawnModel:
    """Requests of one model of a trial, and the fleet for them."""

    trial: Trial
    number: int
    loop: OpenLoop = field(repr=False)
    demand: Demand = field(repr=False)

    @property
    def setup(self) -> Setup:
        """Hardware and limits of its workers."""
        return self.trial.fleet.setups[self.number]

    def fleet(self, counts: tuple[int, ...]) -> FleetConfig:
        """Return a fleet with these counts of workers by pool."""
        groups = tuple(
            WorkerGroup(role=role, count=count, prefix_caching=self.trial.has_prefixes)
            for role, count in zip(self.trial.fleet.roles, counts, strict=True)
        )
        return FleetConfig(workers=groups)

    def foresight(self) -> Foresight:
        """Return what a clairvoyant knows of it, with enough workers for the first load."""
        one = Simulation(self.loop, self.fleet((1,) * len(self.trial.fleet.roles)), self.setup,
                         _control(), ClientConfig())  # fmt: skip
        pools = tuple(
            ForeseenPool(
                f"{self.setup.model}/{pool.name}",
                pool.role,
                pool.spec.gpus,
                measure_performance(pool.spec, pool.role, one.config),
            )
            for pool in one.membership.pools.values()
        )
        slo = Slo.parse(self.trial.slo)
        rps, mix = float(self.demand.rps[:_FIRST_STEPS].mean()), self.demand.mixes[0]
        start = tuple(
            max(fewest_workers(pool.model, pool.role, rps, mix, slo, slo.share) or 1, 1)
            for pool in pools
        )
        top = self.trial.fleet.max_workers
        return Foresight(pools, slo, tuple(min(n, top - 1) for n in start), top, START_UP_S)


@dataclass(frozen=True)
class DrawnTrial:
    """A trial's requests of one seed."""

    trial: Trial
    seed: int
    models: tuple[DrawnModel, ...]

    def run(self, planner: str, given: Callable[[int], Planner] | None = None) -> dict[str, Any]:
        """Run it; return the figures.

        Args:
            planner: name and parameters, as in `price,up=0.1`.
            given: makes a planner in its place, of the GPUs of the budget.
        """
        foresights = [model.foresight() for model in self.models]
        members = [
            ModelFleet(model.loop, model.fleet(seen.start), model.setup,
                       ClientConfig(timeout=PATIENCE_S))
            for model, seen in zip(self.models, foresights, strict=True)
        ]  # fmt: skip
        name, *params = planner.split(",")
        top = self.trial.fleet.max_workers * len(members)
        scaling = ScalingConfig(
            slo=self.trial.slo, max_workers=top, start_up=START_UP_S,
            planner={"planner": name} | dict(param.split("=", 1) for param in params),
        )  # fmt: skip
        gpus = max(pool.gpus for seen in foresights for pool in seen.pools)
        made = ModelFleets(
            members, _control(), scaling, seed=self.seed,
            planner=given(top * gpus) if given else None,
        )  # fmt: skip
        return made.document(made.run())


def _control() -> ControlConfig:
    return ControlConfig(max_inflight=UNLIMITED, max_inflight_tokens=UNLIMITED,
                         queue_timeout=UNLIMITED, max_queued=UNLIMITED)  # fmt: skip


def _load(name: str, seconds: float, *pairs: tuple[float, float]) -> tuple[PlannerLoad, ...]:
    return (PlannerLoad(name, seconds, (LoadPart(pieces(*pairs), _CHAT),)),)


def _judged(name: str, seconds: float, *pairs: tuple[float, float]) -> tuple[PlannerLoad, ...]:
    return (PlannerLoad(name, seconds, (LoadPart(pieces(*pairs), _JUDGED),)),)


def _turning(
    seconds: float, turn_s: float, long_rps: float, wordy_rps: float
) -> tuple[PlannerLoad, ...]:
    parts = (
        LoadPart(pieces((0.0, long_rps), (turn_s, 0.0)), _LONG),
        LoadPart(pieces((0.0, 0.0), (turn_s, wordy_rps)), _WORDY),
    )
    return (PlannerLoad("turning", seconds, parts),)


def _trials(
    fleets: tuple[TrialFleet, ...], loads: dict[str, tuple[PlannerLoad, ...]]
) -> list[Trial]:
    return [
        Trial(name, fleet, made, _MOONCAKE_SLO if name == "mooncake" else _SLO)
        for name, made in loads.items()
        for fleet in fleets
    ]


def choosing() -> list[Trial]:
    """Return the trials that may choose constants."""
    day = LoadPart(wave(1.0, 0.6, 1200.0, 2000.0), _CHAT)
    loads = {
        "constant": _load("constant", 1200.0, (0.0, 1.0)),
        "step": _load("step", 1600.0, (0.0, 0.8), (400.0, 2.2), (1000.0, 0.6)),
        "ramp": _load("ramp", 1600.0, (0.0, 0.6), *ramp(0.6, 2.0, 200.0, 600.0), (600.0, 2.0),
                      *ramp(2.0, 1.0, 900.0, 1300.0)),
        "burst": _load("burst", 1000.0, (0.0, 1.5), (200.0, 4.0), (350.0, 0.7), (550.0, 2.5),
                       (750.0, 1.0)),
        "waves": (PlannerLoad("waves", 2000.0, (day,)),),
        "azure": (PlannerLoad("azure", 1500.0, trace=AZURE, requests=1500, begin=0.02),),
        "turning": _turning(1400.0, 700.0, 0.7, 1.8),
    }  # fmt: skip
    return _trials((AGGREGATED, SEPARATE), loads)


def judging() -> list[Trial]:
    """Return the trials that judge, and choose nothing."""
    day = LoadPart(wave(0.9, 0.7, 1500.0, 1500.0), _JUDGED)
    first = LoadPart(pieces((0.0, 0.4), (400.0, 1.2), (900.0, 0.5)), _JUDGED)
    other = LoadPart(pieces((0.0, 1.1), (550.0, 0.4), (1000.0, 0.9)), _JUDGED)
    loads = {
        "constant": _judged("constant", 1000.0, (0.0, 1.1)),
        "step": _judged("step", 1300.0, (0.0, 0.6), (400.0, 1.9), (800.0, 0.6)),
        "ramp": _judged("ramp", 1300.0, (0.0, 0.4), *ramp(0.4, 1.9, 200.0, 700.0), (700.0, 1.9),
                        *ramp(1.9, 0.7, 900.0, 1200.0)),
        "burst": _judged("burst", 900.0, *((150.0 * n, 0.2 * rate) for n, rate in
                                           enumerate((15.0, 2.0, 10.0, 15.0, 5.0, 2.0)))),
        "day": (PlannerLoad("day", 1500.0, (day,)),),
        "azure": (PlannerLoad("azure", 1300.0, trace=AZURE, requests=1100, begin=0.46),),
        "mooncake": (PlannerLoad("mooncake", 1300.0, trace=MOONCAKE, requests=800, begin=0.5),),
        "turning": _turning(1300.0, 650.0, 0.8, 1.5),
        "two models": (PlannerLoad("first", 1300.0, (first,)),
                       PlannerLoad("second", 1300.0, (other,))),
    }  # fmt: skip
    return _trials((AGGREGATED, SEPARATE, WIDE), loads)
