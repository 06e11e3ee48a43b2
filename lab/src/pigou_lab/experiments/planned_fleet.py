"""Runs of a planner on the paper's workers, for the experiments of the third game.

Prompts and answers are longer than the paper's, so that few requests load a fleet for long, and KV
memory bounds a decode worker:

| constant | value |
|---|---|
| prompt | 2,560 tokens: 20 of the paper's, and its serial prefill 20 times as long |
| answer | 512 tokens |
| KV | 2,000 blocks of 16 tokens: 10 streams of a worker |
| objective | TTFT 6 prompts, ITL 1.5 times that of one stream |
| patience | a client gives up after 60 s |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pigou.config import ControlConfig
from pigou.control.planner.planner import Planner
from pigou.control.routing.policy import RoutingPolicy
from pigou.objectives import Objectives, Slo
from pigou.performance.model import PerformanceModel
from pigou.performance.speed import RequestMix
from pigou.request import Role
from pigou.sim.arrival_rate import RateSchedule
from pigou.sim.client import ClientConfig
from pigou.sim.fleet_config import (
    FleetConfig,
    RoleFlipConfig,
    ScalingConfig,
    StartUpConfig,
    WorkerGroup,
)
from pigou.sim.pool_performance import measure_performance
from pigou.sim.scaling import PlannedFleet, build_planner
from pigou.sim.setup import Setup
from pigou.sim.simulation import Simulation, unlimited
from pigou.sim.workload import RequestLengths, renewal
from pigou_lab.experiments.fleets import PaperFleet
from pigou_lab.experiments.results import Row, over_seeds, run_simulation

PROMPT, ANSWER, BLOCKS = 2560, 512, 2000
#: Prompts of the paper in one of ours; service times, and factor of ITL, that are allowed.
LONGER, TTFT_PROMPTS, ITL_FACTOR = 20, 6.0, 1.5
START_UP_S, PATIENCE_S = 100.0, 60.0
MIX = RequestMix(float(PROMPT), float(ANSWER))
#: Seconds between two computations of the Price of Anarchy.
_ASSESS_S = 30.0


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A planner on prefill and decode workers."""

    fleet: PaperFleet
    planner: str
    schedule: RateSchedule  # requests a second
    seconds: float
    start: tuple[int, int]  # prefill and decode workers at the beginning
    max_workers: int
    lag_s: float = START_UP_S
    assumed_lag_s: float = START_UP_S
    params: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "least-loaded"
    templates: int = 0  # different prompts; 0 for all different
    caching: bool = True  # whether prefixes are cached
    limits: bool = False  # whether the gateway keeps its default limits, and queues

    @property
    def prompt_s(self) -> float:
        """Seconds of a prompt on one worker."""
        return LONGER * self.fleet.law("serial-prefill").prefill

    @property
    def slo(self) -> str:
        """The objective."""
        itl_s = ITL_FACTOR * self.fleet.law("serial-prefill").decode(1)
        return f"ttft={TTFT_PROMPTS * self.prompt_s:g},itl={itl_s:g}"

    def simulation(
        self, seed: int, planner: Planner | None = None, policy: RoutingPolicy | None = None
    ) -> Simulation:
        """Return the run of a seed; `planner` and `policy` take the place of the named ones."""
        if planner is None:
            planner = self.make_planner(seed)
        return self._simulation(seed, planner, policy)

    def make_planner(self, seed: int) -> Planner:
        """Return the planner, assuming a lag of `assumed_lag_s`."""
        probe = self._simulation(seed, None)
        assumed = FleetConfig(workers=probe.config.workers, start_up=_start_up(self.assumed_lag_s),
                           flip=RoleFlipConfig(seconds=self.assumed_lag_s))  # fmt: skip
        config = self._scaling()
        objectives = Objectives(Slo.parse(self.slo))
        fleets = (PlannedFleet("", assumed, probe.membership),)
        return build_planner(config, objectives, fleets, seed)

    def performance(self) -> dict[Role, PerformanceModel]:
        """Return the performance models of its pools."""
        probe = self._simulation(0, None)
        return {
            pool.role: measure_performance(pool.spec, pool.role, probe.config)
            for pool in probe.membership.pools.values()
        }

    def _scaling(self) -> ScalingConfig:
        named = {"planner": self.planner, **self.params}
        return ScalingConfig(slo=self.slo, planner=named, max_workers=self.max_workers)

    def _simulation(
        self, seed: int, planner: Planner | None, policy: RoutingPolicy | None = None
    ) -> Simulation:
        law = self.fleet.law("serial-prefill")
        timing = (
            f"law:itl_a={law.itl_a!r},itl_b={law.itl_b!r},prefill_token={self.prompt_s / PROMPT!r}"
        )
        workers = tuple(
            WorkerGroup(role=role, count=count, prefix_caching=self.caching)
            for role, count in zip((Role.PREFILL, Role.DECODE), self.start, strict=True)
        )
        lengths = RequestLengths(input=(PROMPT, PROMPT), output=(ANSWER, ANSWER),
                                 templates=self.templates)  # fmt: skip
        control = (ControlConfig if self.limits else unlimited)(policy=self.policy, seed=seed)
        scaling = ScalingConfig(slo=self.slo) if planner is None else self._scaling()
        return Simulation(
            renewal(lengths, self.schedule, 1.0, 0, self.seconds, seed),
            FleetConfig(workers=workers, start_up=_start_up(self.lag_s),
                        flip=RoleFlipConfig(seconds=self.lag_s)),
            Setup(model=self.fleet.model, gpu="B200", tp=self.fleet.tp, timing=timing,
                  blocks=BLOCKS),
            control, ClientConfig(timeout=PATIENCE_S), seed=seed, assess_every=_ASSESS_S,
            policy=policy, scaling=scaling, planner=planner,
        )  # fmt: skip


def _start_up(seconds: float) -> StartUpConfig:
    return StartUpConfig(seconds=seconds)


def planned_figures(simulation: Simulation) -> Row:
    """Run a simulation; return its figures, as rows of experiments have them."""
    document = run_simulation(simulation).document()
    planner = document["planner"]
    return {
        "ttft_p99_s": document["ttft_s"]["p99"], "itl_p99_s": document["itl_s"]["p99"],
        "poa_legacy": document["poa"]["legacy"], "poa": document["poa"]["whole"],
        "rps": document["throughput_rps"], "attained": document["slo"]["attained"],
        "ttft_mean_s": document["ttft_s"]["mean"], "e2e_mean_s": document["e2e_s"]["mean"],
        "hits": document["prefix_hit_ratio"], "gpu_hours": planner["gpu_hours"],
        "moves": planner["moves"], "reversals": planner["reversals"],
        "settle_s": planner["settle_s"], "replicas": planner["replicas"],
    }  # fmt: skip


def supply(replicas: Mapping[str, Any]) -> tuple[int, int]:
    """Return a record's prefill and decode workers, starting ones included."""
    pools = replicas["pools"]
    return tuple(pools[role]["starting"] + pools[role]["active"] for role in ("prefill", "decode"))


def mean_row(experiment: str, level: int, runs: Sequence[Row], **rest: Any) -> Row:
    """Return a row of means over the runs of several seeds."""
    numbers = {
        name: [run[name] for run in runs] for name, value in runs[0].items()
        if isinstance(value, int | float)
    }  # fmt: skip
    whole = {name: values for name, values in numbers.items() if None not in values}
    row: Row = {"experiment": experiment, "concurrency": level, **over_seeds(whole)}
    row |= {name: row.get(name) for name in ("ttft_p99_s", "itl_p99_s", "poa_legacy", "rps")}
    row["runs"] = [{k: v for k, v in run.items() if k != "replicas"} for run in runs]
    return row | rest
