"""Experiment 3: a spike of 32, 128 and 32 users, with static and adaptive routing.

Four arms tell apart what the paper's two mixed. Its adaptive arm has figures that a load generator
gives which runs in chunks of five seconds, each of which waits for all of its requests; so there
is an arm with the switch of parameters alone, and one with the chunks alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from pigou.control.saturation.regime import Regime
from pigou.experiments.detect import Poller
from pigou.experiments.fleets import LENGTHS, Fleet, Reading, simulation
from pigou.experiments.laws import RAMP
from pigou.experiments.outliers import without
from pigou.experiments.paper import EXPERIMENT3, SPIKE, SWITCH_S, THRESHOLDS
from pigou.experiments.regimes import steer, watch
from pigou.experiments.rows import Row, row
from pigou.experiments.window import Marks, Measured, measure
from pigou.sim.workload import ClosedLoop

#: Seconds of a chunk: the paper's detector polls every five.
CHUNK = 5.0


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to run the spike.

    Attributes:
        name: of it.
        switches: whether the controller sets the router's parameters.
        chunked: whether the load comes in chunks.
    """

    name: str
    switches: bool
    chunked: bool


#: The first two are the paper's; the others take them apart.
ARMS = (
    Arm("static", False, False), Arm("adaptive", True, True),
    Arm("switch-only", True, False), Arm("chunks-only", False, True),
)  # fmt: skip


@dataclass
class _Runs:
    phases: dict[str, list[Measured]] = field(default_factory=dict)
    switched: list[float] = field(default_factory=list)


def adaptive(
    fleet: Fleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for each arm and phase; each seed is an iteration of all arms, in random order.

    Args:
        fleet: of the paper.
        reading: of the paper.
        seeds: one for each iteration.
        levels: those of `SPIKE`; there are no others.
    """
    if set(levels) != {users for _, users, _ in SPIKE}:
        raise ValueError(f"levels are {levels}: the spike has its own")
    found = {arm.name: _Runs() for arm in ARMS}
    order = Random(0)
    for seed in seeds:
        for arm in order.sample(ARMS, len(ARMS)):
            _iterate(found[arm.name], arm, fleet, reading, seed)
    for arm in ARMS:
        runs = found[arm.name]
        for phase, users, _ in SPIKE:
            paper = EXPERIMENT3[fleet.name].get((arm.name, phase))
            seen = runs.phases[phase]
            yield row(
                "adaptive", users, seen, seeds, paper,
                strategy=arm.name, phase=phase, switch_s=_mean(runs.switched),
                paper_switch_s=SWITCH_S[fleet.name] if arm.name == "adaptive" else None,
                outliers=without([asdict(each) for each in seen]),
            )  # fmt: skip


def _iterate(runs: _Runs, arm: Arm, fleet: Fleet, reading: Reading, seed: int) -> None:
    """Run the spike once."""
    loop = ClosedLoop(
        lengths=LENGTHS, phases=tuple((users, hold) for _, users, hold in SPIKE), ramp=RAMP,
        barrier=CHUNK if arm.chunked else 0.0,
    )  # fmt: skip
    made = simulation(fleet, reading, loop, seed)
    poller = Poller(THRESHOLDS[fleet.name], steer if arm.switches else watch)
    poller.follow(made)
    ends = [RAMP]
    for _, _, hold in SPIKE:
        ends.append(ends[-1] + hold)
    marks = Marks(ends)
    marks.follow(made)
    calls = made.run().calls
    for place, (phase, users, _) in enumerate(SPIKE):
        gaps = marks.between(place, place + 1)
        seen = measure(calls, ends[place], ends[place + 1], gaps, fleet.decoders, meant=True)
        if seen is None:
            raise ValueError(f"phase {phase} of {users} users: nothing completed in it")
        runs.phases.setdefault(phase, []).append(seen)
    if arm.switches:
        runs.switched.append(poller.first(Regime.TRANSITION, ends[1]) - ends[1])


def _mean(values: Sequence[float]) -> float | None:
    """Mean of those that are numbers; None where none is."""
    known = [each for each in values if not math.isnan(each)]
    return statistics.fmean(known) if known else None


def gains(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return static over each arm in the saturated phase: TTFT P99, index, rate, in flight."""
    at = {each["strategy"]: each for each in rows if each["phase"] == "saturated"}
    static = at["static"]
    return {
        f"static_over_{name}": {
            key: static[key] / each[key] for key in ("ttft_p99_s", "poa_legacy", "rps", "inflight")
        }
        for name, each in at.items()
        if name != "static"
    }
