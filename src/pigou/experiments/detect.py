"""The paper's detector beside a run, and what else is seen of a fleet as it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pigou.control.saturation.paper_detector import PaperConfig, PaperDetector
from pigou.control.saturation.regime import LEVELS, Regime, TTFTSample
from pigou.experiments.paper import Thresholds
from pigou.experiments.window import at
from pigou.request import SECOND
from pigou.sim.call import Call
from pigou.sim.result import Result
from pigou.sim.simulation import Simulation
from pigou.sim.virtual_clock import EPOCH, Phase

POLL = 5.0
_PARTS = ("whole", "queueing", "routing", "prefill_decode")


def config(thresholds: Thresholds) -> PaperConfig:
    """Return the paper's detector with these thresholds; its margin is a tenth of the lower."""
    return PaperConfig(theta1=thresholds.low, theta2=thresholds.high, margin=0.1 * thresholds.low)


def regime_of(
    calls: Sequence[Call], end: float, thresholds: Thresholds, *, server: bool = False
) -> str:
    """Return the highest regime that the paper's detector tells up to `end` (seconds).

    It is fed with first tokens as the client saw them, or, with `server`, from sending on: what
    a frontend can see of a request that waited for a connection of its client.
    """
    detector, highest = PaperDetector(config(thresholds)), 0
    for call in sorted((each for each in calls if each.first), key=lambda each: each.first):
        if call.first > at(end):
            break
        begun = call.sent if server else call.intended
        regime = detector.update(call.first, TTFTSample((call.first - begun) / SECOND))
        highest = max(highest, regime.level)
    return LEVELS[highest].value


@dataclass
class Watcher:
    """Looks at a fleet every five seconds.

    Attributes:
        usage: largest share of the device's KV blocks in use on any worker.
        regimes: (seconds, regime) whenever the control plane's own detector changed its mind.
    """

    usage: float = 0.0
    regimes: list[tuple[float, Regime]] = field(default_factory=list)
    _simulation: Simulation | None = None

    def follow(self, simulation: Simulation) -> None:
        """Begin to look; call it before the run."""
        self._simulation = simulation
        simulation.clock.at(EPOCH, Phase.TICK, -91, self._look)

    def memory(self) -> dict[str, float]:
        """Return what the workers' KV caches hold at the end, and what they gave up.

        `g1_cached_blocks` and `g1_evicted_blocks` count all workers; `g1_used_at_most` is the
        largest share in use on any worker at any look.
        """
        assert self._simulation is not None
        fleet = self._simulation.fleet
        cores = [member.sim.core for member in fleet.members if member.sim is not None]
        return {
            "g1_used_at_most": self.usage,
            "g1_cached_blocks": sum(core.cached_blocks for core in cores),
            "g1_evicted_blocks": fleet.plane.index.removed,
        }

    def anarchy(self, result: Result) -> dict[str, float] | None:
        """Return the calibrated Price of Anarchy of the last window, and its parts."""
        if not result.assessments:
            return None
        last = result.assessments[-1].anarchy
        return {name: getattr(last, name).value for name in _PARTS}

    def _look(self, now: int) -> None:
        assert self._simulation is not None
        fleet = self._simulation.fleet
        for member in fleet.members:
            if member.sim is not None:
                self.usage = max(self.usage, member.sim.load(now)[2])
        regime = fleet.plane.tracker.detector.regime
        if not self.regimes or self.regimes[-1][1] is not regime:
            self.regimes.append(((now - EPOCH) / SECOND, regime))
        self._simulation.clock.at(now + round(POLL * SECOND), Phase.TICK, -91, self._look)


@dataclass
class Poller:
    """The paper's controller: polls the client's TTFT, and sets the router by the regime.

    It is a process beside the fleet, and sees what the load generator sees.

    Attributes:
        thresholds: of its detector.
        act: called with each new regime, and the simulation.
        switches: (seconds, regime) of each change.
    """

    thresholds: Thresholds
    act: Callable[[Simulation, Regime], None]
    switches: list[tuple[float, Regime]] = field(default_factory=list)
    _told: int = 0

    def follow(self, simulation: Simulation) -> None:
        """Begin to poll; call it before the run."""
        detector = PaperDetector(config(self.thresholds))
        pending: list[Call] = []

        def poll(now: int) -> None:
            nonlocal pending
            pending += simulation.client.calls[self._told :]
            self._told = len(simulation.client.calls)
            came = sorted((each for each in pending if each.first), key=lambda each: each.first)
            pending = [each for each in pending if not each.first]
            before = detector.regime
            for call in came:
                detector.update(call.first, TTFTSample((call.first - call.intended) / SECOND))
            detector.tick(now, len(pending))
            if detector.regime is not before:
                self.switches.append(((now - EPOCH) / SECOND, detector.regime))
                self.act(simulation, detector.regime)
            simulation.clock.at(now + round(POLL * SECOND), Phase.TICK, -92, poll)

        simulation.clock.at(EPOCH + round(POLL * SECOND), Phase.TICK, -92, poll)

    def first(self, regime: Regime, after: float = 0.0) -> float:
        """Return the seconds at which a regime (or a higher one) came first; NaN if never."""
        for seconds, found in self.switches:
            if found.level >= regime.level and seconds >= after:
                return seconds
        return math.nan


def as_json(switches: Sequence[tuple[float, Regime]]) -> list[dict[str, Any]]:
    """Return changes of regime as JSON has them."""
    return [{"at_s": seconds, "regime": regime.value} for seconds, regime in switches]
