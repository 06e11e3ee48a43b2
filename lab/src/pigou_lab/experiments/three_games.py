"""Planner, router and cache coupled, and each coupling switched off in turn.

Load triples and falls again, in bursts shorter than a start; prompts share a few templates.
| row | what is off |
|---|---|
| coupled | nothing: `toll` routes, `price` plans, prefixes are cached |
| router without cache | routing ignores prefixes (`least-loaded`) |
| router without KV price | routes do not pay for the blocks that theirs push out (`toll_memory`) |
| planner without cache | the planner sees no hits and no cached tokens |
| planner without routes | the planner does not see where routes want prompts computed |
| no cache | prefixes are not cached |
| anarchy | the Price of Anarchy alone drives the planner (`AnarchyPlanner`) |
| static | the fleet stays as it is |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from scipy.special import stdtrit

from pigou.control.planner.messages import Action, FlipRole, PlannerDecision
from pigou.control.planner.planner import Planner
from pigou.control.routing.policy import CostTable, RequestView
from pigou.control.routing.toll.policy import Toll
from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Role
from pigou.sim.arrival_rate import RateSchedule
from pigou.windows.planner_window import PlannerWindow, WorkerState
from pigou_lab.experiments.fleets import PaperFleet, Reading
from pigou_lab.experiments.planned_fleet import PlannedRun, mean_row, planned_figures
from pigou_lab.experiments.results import Row

#: Load in per cent of what three prefill workers compute without hits.
LEVELS = (75,)
START, WORKERS, SECONDS, TEMPLATES = (2, 2), 8, 900.0, 60
#: Seconds from one burst to the next, and its rate over the mean for a third of them.
BURST_S, BURST = 60.0, 2.0
#: Figures whose differences are shown.
COMPARED = ("attained", "gpu_hours", "ttft_mean_s", "e2e_mean_s")
#: Price of Anarchy that changes the split, and the windows in a row that must exceed it.
_ANARCHY, _WINDOWS = 1.02, 6


class NoAnarchyParams(msgspec.Struct, frozen=True):
    """None."""


class AnarchyPlanner:
    """Flips workers towards the better split of the calibrated Price of Anarchy (section 10.1)."""

    name: ClassVar[str] = "anarchy"
    Params: ClassVar[type[msgspec.Struct]] = NoAnarchyParams

    def __init__(self) -> None:
        self._window: PlannerWindow | None = None
        self._windows = 0

    def observe(self, window: PlannerWindow) -> None:
        """Observe one interval."""
        self._window = window

    def tick(self, now_ns: int) -> PlannerDecision:
        """Return a flip where the better split has differed for some windows."""
        window, self._window = self._window, None
        actions: tuple[Action, ...] = ()
        if window is not None:
            actions = self._flip(window)
        return PlannerDecision(now_ns=now_ns, planner=self.name, actions=actions)

    def _flip(self, window: PlannerWindow) -> tuple[Action, ...]:
        prefill, decode = (
            next(pool for pool in window.pools if pool.role is role)
            for role in (Role.PREFILL, Role.DECODE)
        )
        better = window.better_prefill.get(prefill.model)
        anarchy = window.price_of_anarchy.get(prefill.model, 1.0)
        size = prefill.ready + prefill.starting
        if better is None or better == size or anarchy < _ANARCHY or prefill.starting:
            self._windows = 0
            return ()
        self._windows += 1
        source, target = (decode, prefill) if better > size else (prefill, decode)
        ready = source.in_state(WorkerState.READY)
        if self._windows < _WINDOWS or len(ready) < 2:
            return ()
        self._windows = 0
        victim = min(ready, key=lambda worker: (worker.running or 0, worker.id))
        return (FlipRole(victim.id, target.role, target.name),)


class BlindPlanner:
    """Hides hits and cached tokens (`cache`), or where routes want prompts, from a planner."""

    name: ClassVar[str] = "blind"
    Params: ClassVar[type[msgspec.Struct]] = NoAnarchyParams

    def __init__(self, inner: Planner, cache: bool) -> None:
        self._inner, self._cache = inner, cache

    def observe(self, window: PlannerWindow) -> None:
        """Pass on the visible part."""
        self._inner.observe(hide_cache(window) if self._cache else hide_routes(window))

    def tick(self, now_ns: int) -> PlannerDecision:
        """Return the decision of the inner planner."""
        return self._inner.tick(now_ns)


class FreeMemoryToll(Toll):
    """The toll where KV memory has no price."""

    @property
    def full_price(self) -> bool:
        """False: the true price has a toll on memory."""
        return False

    def parts(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> CostTable:
        """Return the parts of the toll, as if nothing evicted came back."""
        free = np.zeros(len(fleet.ids))
        return super().parts(
            request, msgspec.structs.replace(fleet, recomputed_share=free), candidates
        )


def hide_cache(window: PlannerWindow) -> PlannerWindow:
    """Return a window without hits and cached tokens."""
    loads = tuple(msgspec.structs.replace(load, hit_rate=None) for load in window.loads)
    return msgspec.structs.replace(_without(window, "cached_tokens"), loads=loads)


def hide_routes(window: PlannerWindow) -> PlannerWindow:
    """Return a window without the tokens that routes bring to workers."""
    return _without(window, "routed_tokens")


def _without(window: PlannerWindow, figure: str) -> PlannerWindow:
    replace = msgspec.structs.replace
    pools = tuple(
        replace(pool, workers=tuple(replace(w, **{figure: None}) for w in pool.workers))
        for pool in window.pools
    )
    return replace(window, pools=pools)


def three_games(
    fleet: PaperFleet, _: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for each load and coupling."""
    for level in levels:
        for name in ARMS:
            runs = [planned_figures(_simulation(fleet, level, name, seed)) for seed in seeds]
            yield mean_row("three-games", level, runs, arm=name)


#: Rows: what differs from `coupled`, of `PlannedRun`.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "coupled": {},
    "router without cache": {"policy": "least-loaded"},
    "router without KV price": {},
    "planner without cache": {},
    "planner without routes": {},
    "no cache": {"caching": False},
    "anarchy": {"planner": "static"},
    "static": {"planner": "static"},
}


def _simulation(fleet: PaperFleet, level: int, name: str, seed: int) -> Any:
    made = coupled_run(fleet, level, ARMS[name])
    planner: Planner = made.make_planner(seed)
    if name == "anarchy":
        planner = AnarchyPlanner()
    elif name.startswith("planner without"):
        planner = BlindPlanner(planner, cache=name.endswith("cache"))
    return made.simulation(seed, planner, FreeMemoryToll() if name.endswith("KV price") else None)


def coupled_run(fleet: PaperFleet, level: int, changes: Mapping[str, Any]) -> PlannedRun:
    """Return the run of a load, with some changes."""
    prompt_s = PlannedRun(fleet, "price", RateSchedule.of(1.0), 1.0, START, WORKERS).prompt_s
    high = level / 100 * 3 / prompt_s
    values: dict[str, Any] = {"planner": "price", "policy": "toll", "templates": TEMPLATES}
    return PlannedRun(
        fleet=fleet, schedule=bursts(high), seconds=SECONDS, start=START, max_workers=WORKERS,
        limits=True, **(values | dict(changes)),
    )  # fmt: skip


def bursts(high: float) -> RateSchedule:
    """Return a load that triples and falls again, in bursts shorter than a start."""
    seconds = [float(second) for second in np.arange(0, SECONDS, BURST_S / 3)]
    rates = [
        (high if SECONDS / 4 <= second < 3 * SECONDS / 4 else high / 3)
        * (BURST if piece % 3 == 0 else (3.0 - BURST) / 2.0)
        for piece, second in enumerate(seconds)
    ]
    return RateSchedule(seconds=tuple(seconds), rates=tuple(rates))


def verdict(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return what each row differs by from the coupled one: the mean, and half of its 95% interval.

    Differences are of runs of the same seed, and the interval Student's; 0 for one seed.
    """
    coupled = {row["concurrency"]: row for row in rows if row["arm"] == "coupled"}
    return {
        f"{row['arm']}_at_{row['concurrency']}": {
            name: _difference(row["runs"], coupled[row["concurrency"]]["runs"], name)
            for name in COMPARED
        }
        for row in rows
        if row["arm"] != "coupled"
    }


def _difference(runs: Sequence[Row], others: Sequence[Row], name: str) -> list[float]:
    differences = np.array(
        [run[name] - other[name] for run, other in zip(runs, others, strict=True)]
    )
    count = len(differences)
    half = stdtrit(count - 1, 0.975) * differences.std(ddof=1) / count**0.5 if count > 1 else 0.0
    return [float(differences.mean()), float(half)]
