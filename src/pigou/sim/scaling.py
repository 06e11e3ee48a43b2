"""Scaling of a simulated fleet: a planner observes windows, and its actions are carried out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pigou.config import ConfigError
from pigou.control.planner.actuation import carry_out
from pigou.control.planner.messages import PlannerDecision
from pigou.control.planner.planner import Planner
from pigou.request import SECOND
from pigou.sim.scaled_fleet import ScaledFleet, ScaledFleets
from pigou.sim.scaling_config import ScalingConfig
from pigou.sim.scaling_summary import reversals, settle_seconds
from pigou.sim.virtual_clock import EPOCH, Clock, Phase
from pigou.windows.planner_window import PlannerWindow

#: Key of the planner's events: after the control plane's tick and the load reports of a moment.
_PLANNER_KEY = -1


class Scaling:
    """Lets a planner change fleets, every few seconds of the virtual clock.

    An action that cannot be carried out is refused, and the decision says why: it would exceed
    `max_workers`, take the last worker that decodes, or names a worker or pool that is not there.
    """

    def __init__(
        self, planner: Planner, fleets: Sequence[ScaledFleet], clock: Clock, config: ScalingConfig
    ) -> None:
        self.decisions: list[dict[str, Any]] = []
        self.replicas: list[dict[str, Any]] = []
        self._planner, self._fleets = planner, tuple(fleets)
        self._managed = ScaledFleets(self._fleets)
        self._clock, self._config = clock, config
        self._interval_ns = round(config.interval_s * SECOND)
        self._sample_ns = min(SECOND, self._interval_ns)
        self.peak_workers = self.size
        if 0 < (config.max_workers or 0) < self.size:
            raise ConfigError(
                f"max_workers is {config.max_workers}, and the fleet begins with {self.size}; "
                "give at least as many"
            )
        self._record(EPOCH)
        clock.at(EPOCH + self._sample_ns, Phase.TICK, _PLANNER_KEY, self._sample)
        clock.at(EPOCH + self._interval_ns, Phase.TICK, _PLANNER_KEY, self._plan)

    @property
    def size(self) -> int:
        """Workers in all states."""
        return self._managed.size

    def summary(self, now: int) -> dict[str, Any]:
        """Return the figures of the run until now."""
        hours: dict[str, dict[str, float]] = {}
        for fleet in self._fleets:
            for role, times in fleet.membership.gpu_seconds(now).items():
                hours[fleet.prefix + role] = {name: s / 3600 for name, s in times.items()}
        settled = [
            settle_seconds(fleet.moves, fleet.membership.changes, fleet.arrivals.changes_ns, now)
            for fleet in self._fleets
        ]
        return {
            "name": self._planner.name,
            "gpu_hours": sum(value for times in hours.values() for value in times.values()),
            "moves": sum(len(fleet.moves) for fleet in self._fleets),
            "reversals": sum(reversals(fleet.moves, fleet.arrivals) for fleet in self._fleets),
            "settle_s": max(settled),
            "peak_workers": self.peak_workers,
            "gpu_hours_by_role": hours,
            "decisions": self.decisions,
            "replicas": self.replicas,
        }

    def _sample(self, now: int) -> None:
        for fleet in self._fleets:
            fleet.meter.sample(now)
        self._clock.at(now + self._sample_ns, Phase.TICK, _PLANNER_KEY, self._sample)

    def _plan(self, now: int) -> None:
        """Observe a window, decide, and do it."""
        windows = [(fleet.prefix, fleet.meter.window(now)) for fleet in self._fleets]
        self._planner.observe(_merged(windows))
        decision = self._planner.tick(now)
        limit = self._config.max_workers or 0
        results = [carry_out(action, self._managed, now, limit) for action in decision.actions]
        refusals = [refusal for refusal in results if refusal]
        self.peak_workers = max(self.peak_workers, self.size)
        if decision.actions:
            self.decisions.append(_entry(decision, refusals))
        self._record(now)
        self._clock.at(now + self._interval_ns, Phase.TICK, _PLANNER_KEY, self._plan)

    def _record(self, now: int) -> None:
        """Record the workers of each pool, where they have changed."""
        pools = {
            fleet.prefix + pool: fleet.membership.counts(pool)
            for fleet in self._fleets
            for pool in fleet.membership.pools
        }
        if not self.replicas or self.replicas[-1]["pools"] != pools:
            self.replicas.append({"at_s": (now - EPOCH) / SECOND, "pools": pools})


def _merged(windows: Sequence[tuple[str, PlannerWindow]]) -> PlannerWindow:
    """Return one window of several fleets, their prefixes before the names."""
    (prefix, first), *_ = windows
    if len(windows) == 1 and not prefix:
        return first
    pools = []
    for prefix, window in windows:
        for pool in window.pools:
            workers = tuple(
                msgspec.structs.replace(worker, id=prefix + worker.id) for worker in pool.workers
            )
            pools.append(msgspec.structs.replace(pool, name=prefix + pool.name, workers=workers))
    return PlannerWindow(
        now_ns=first.now_ns,
        seconds=first.seconds,
        loads=tuple(load for _, window in windows for load in window.loads),
        pools=tuple(pools),
        price_of_anarchy={k: v for _, w in windows for k, v in w.price_of_anarchy.items()},
        better_prefill={k: v for _, w in windows for k, v in w.better_prefill.items()},
    )


def _entry(decision: PlannerDecision, refusals: list[str]) -> dict[str, Any]:
    """Return a decision as the figures have it; what is not known is left out."""
    entry: dict[str, Any] = {
        "at_s": (decision.now_ns - EPOCH) / SECOND,
        "actions": [msgspec.to_builtins(action) for action in decision.actions],
        "reasons": list(decision.reasons),
    }
    for name in ("forecasts", "pools", "alternatives"):
        if parts := getattr(decision, name):
            entry[name] = [
                {
                    key: value
                    for key, value in msgspec.to_builtins(part).items()
                    if value is not None
                }
                for part in parts
            ]
    if refusals:
        entry["refused"] = refusals
    return entry
