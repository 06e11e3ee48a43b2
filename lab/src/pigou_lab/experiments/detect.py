"""The paper's detector beside a run, and a watcher of the fleet's regime and KV use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pigou.control.saturation.regime import LEVELS, Regime, TTFTSample
from pigou.request import SECOND
from pigou.sim.request_run import RequestRun
from pigou.sim.result import SimulationResult
from pigou.sim.simulation import Simulation
from pigou.sim.streams import ITLHistogram
from pigou.sim.virtual_clock import EPOCH, Phase
from pigou_lab.detectors import PaperConfig, PaperDetector
from pigou_lab.experiments.paper import Thresholds
from pigou_lab.experiments.window import Switch, clock_ns, copy_of

POLL = 5.0
_PARTS = ("whole", "queueing", "routing", "prefill_decode")


def config(thresholds: Thresholds) -> PaperConfig:
    """Return the paper's detector with these thresholds; its margin is a tenth of the lower."""
    return PaperConfig(theta1=thresholds.low, theta2=thresholds.high, margin=0.1 * thresholds.low)


def detector_values(thresholds: Thresholds) -> dict[str, object]:
    """Return the paper's detector as `ControlConfig.saturation` names it."""
    return {"detector": "paper", **msgspec.to_builtins(config(thresholds))}


def regime_of(
    runs: Sequence[RequestRun], end: float, thresholds: Thresholds, *, server: bool = False
) -> str:
    """Return the paper detector's highest regime up to `end` (s), on client or `server` TTFT."""
    detector, highest = PaperDetector(config(thresholds)), 0
    for run in sorted(
        (run for run in runs if run.first_token_ns), key=lambda run: run.first_token_ns
    ):
        if run.first_token_ns > clock_ns(end):
            break
        begun = run.sent_ns if server else run.intended_ns
        regime = detector.update(
            run.first_token_ns, TTFTSample((run.first_token_ns - begun) / SECOND)
        )
        highest = max(highest, regime.level)
    return LEVELS[highest].value


@dataclass
class Watcher:
    """Samples a fleet every five seconds."""

    usage: float = 0.0  # largest share of the device's KV blocks in use on any worker
    # (seconds, regime) whenever the control plane's own detector changed its mind.
    regimes: list[tuple[float, Regime]] = field(default_factory=list)
    _simulation: Simulation | None = None

    def follow(self, simulation: Simulation) -> None:
        """Begin to sample; call it before the run."""
        self._simulation = simulation
        simulation.clock.at(EPOCH, Phase.TICK, -91, self._look)

    def memory(self) -> dict[str, float]:
        """Return cached and evicted KV blocks of all workers, and the largest share in use."""
        assert self._simulation is not None
        fleet = self._simulation.fleet
        cores = [member.sim.core for member in fleet.workers if member.sim is not None]
        return {
            "g1_used_at_most": self.usage,
            "g1_cached_blocks": sum(core.cached_blocks for core in cores),
            "g1_evicted_blocks": fleet.plane.index.removed,
        }

    def anarchy(self, result: SimulationResult) -> dict[str, float] | None:
        """Return the calibrated Price of Anarchy of the last window, and its parts."""
        if not result.assessments:
            return None
        last = result.assessments[-1].anarchy
        return {name: getattr(last, name).value for name in _PARTS}

    def _look(self, now: int) -> None:
        assert self._simulation is not None
        fleet = self._simulation.fleet
        for member in fleet.workers:
            if member.sim is not None:
                self.usage = max(self.usage, member.sim.load(now)[2])
        regime = fleet.plane.tracker.detector.regime
        if not self.regimes or self.regimes[-1][1] is not regime:
            self.regimes.append(((now - EPOCH) / SECOND, regime))
        self._simulation.clock.at(now + round(POLL * SECOND), Phase.TICK, -91, self._look)


@dataclass
class Poller:
    """The paper's controller: polls the client's TTFT outside the fleet, and sets the router."""

    thresholds: Thresholds
    act: Callable[[Simulation, Regime], None]
    # (seconds, regime) of each change.
    switches: list[tuple[float, Regime]] = field(default_factory=list)
    gaps: list[ITLHistogram] = field(default_factory=list)  # gaps between tokens until each change
    _polled: int = 0

    def follow(self, simulation: Simulation) -> None:
        """Begin to poll; call it before the run."""
        detector = PaperDetector(config(self.thresholds))
        pending: list[RequestRun] = []

        def poll(now: int) -> None:
            nonlocal pending
            pending += simulation.client.runs[self._polled :]
            self._polled = len(simulation.client.runs)
            arrived = sorted(
                (run for run in pending if run.first_token_ns),
                key=lambda run: run.first_token_ns,
            )
            pending = [run for run in pending if not run.first_token_ns]
            before = detector.regime
            for run in arrived:
                detector.update(
                    run.first_token_ns, TTFTSample((run.first_token_ns - run.intended_ns) / SECOND)
                )
            detector.tick(now, len(pending))
            if detector.regime is not before:
                self.switches.append(((now - EPOCH) / SECOND, detector.regime))
                self.gaps.append(copy_of(simulation.fleet.itl))
                self.act(simulation, detector.regime)
            simulation.clock.at(now + round(POLL * SECOND), Phase.TICK, -92, poll)

        simulation.clock.at(EPOCH + round(POLL * SECOND), Phase.TICK, -92, poll)

    def switch(self, regime: Regime, after: float = 0.0, until: float = math.inf) -> Switch | None:
        """Return the first switch to a regime, or a higher one, in [after, until); None if none."""
        for (seconds, switched), gaps in zip(self.switches, self.gaps, strict=True):
            if switched.level >= regime.level and after <= seconds < until:
                return Switch(seconds, gaps)
        return None

    def first(self, regime: Regime, after: float = 0.0) -> float:
        """Return the seconds of the first switch to a regime, or a higher one; NaN if never."""
        switch = self.switch(regime, after)
        return math.nan if switch is None else switch.seconds


def as_json(switches: Sequence[tuple[float, Regime]]) -> list[dict[str, Any]]:
    """Return changes of regime as JSON has them."""
    return [{"at_s": seconds, "regime": regime.value} for seconds, regime in switches]
