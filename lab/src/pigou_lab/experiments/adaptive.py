"""Experiment 3: a spike of users; four arms separate routing from the load generator's chunks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from pigou.control.saturation.regime import Regime
from pigou.sim.workload import ClosedLoop
from pigou_lab.experiments.detect import Poller
from pigou_lab.experiments.fleets import LENGTHS, PaperFleet, Reading, make_simulation
from pigou_lab.experiments.paper import EXPERIMENT3, OUTLIER, RAMP_S, SPIKE, SWITCH_S, THRESHOLDS
from pigou_lab.experiments.regimes import steer, watch
from pigou_lab.experiments.results import Row, make_row, run_simulation
from pigou_lab.experiments.window import (
    Marks,
    SwitchParts,
    WindowFigures,
    columns,
    measure,
    split,
)

#: The phase in which the controller switches.
SPIKED = "saturated"
#: Seconds of a chunk: the paper's detector polls every five.
CHUNK = 5.0


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to run the spike."""

    name: str
    switches: bool  # whether the controller sets the router's parameters
    chunked: bool  # whether the load comes in chunks


#: The first two are the paper's; the others take them apart.
ARMS = (
    Arm("static", False, False), Arm("adaptive", True, True),
    Arm("switch-only", True, False), Arm("chunks-only", False, True),
)  # fmt: skip


@dataclass
class _Runs:
    phases: dict[str, list[WindowFigures]] = field(default_factory=dict)
    switched: list[float] = field(default_factory=list)
    parts: list[SwitchParts] = field(default_factory=list)  # figures of the spike, a seed each


def adaptive(
    fleet: PaperFleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for each arm and phase; each seed runs all arms, in random order."""
    if set(levels) != {users for _, users, _ in SPIKE}:
        raise ValueError(f"levels are {levels}: the spike has its own")
    runs_by_arm = {arm.name: _Runs() for arm in ARMS}
    order = Random(0)
    for seed in seeds:
        for arm in order.sample(ARMS, len(ARMS)):
            _iterate(runs_by_arm[arm.name], arm, fleet, reading, seed)
    for arm in ARMS:
        runs = runs_by_arm[arm.name]
        for phase, users, _ in SPIKE:
            paper = EXPERIMENT3[fleet.name].get((arm.name, phase))
            figures_of_seeds = runs.phases[phase]
            yield make_row(
                "adaptive", users, figures_of_seeds, seeds, paper,
                {"switch_s": runs.switched, **(columns(runs.parts) if phase == SPIKED else {})},
                strategy=arm.name, phase=phase,
                paper_switch_s=SWITCH_S[fleet.name] if arm.name == "adaptive" else None,
                outliers=outlier_effect([asdict(figures) for figures in figures_of_seeds]),
            )  # fmt: skip


def _iterate(runs: _Runs, arm: Arm, fleet: PaperFleet, reading: Reading, seed: int) -> None:
    loop = ClosedLoop(
        lengths=LENGTHS, phases=tuple((users, seconds) for _, users, seconds in SPIKE), ramp=RAMP_S,
        barrier=CHUNK if arm.chunked else 0.0,
    )  # fmt: skip
    simulation = make_simulation(fleet, reading, loop, seed)
    poller = Poller(THRESHOLDS[fleet.name], steer if arm.switches else watch)
    poller.follow(simulation)
    phase_ends = [RAMP_S]
    for _, _, seconds in SPIKE:
        phase_ends.append(phase_ends[-1] + seconds)
    marks = Marks(phase_ends)
    marks.follow(simulation)
    calls = run_simulation(simulation, strategy=arm.name, seed=seed).runs
    for index, (phase, users, _) in enumerate(SPIKE):
        gaps = marks.between(index, index + 1)
        figures = measure(
            calls, phase_ends[index], phase_ends[index + 1], gaps, fleet.decoders, meant=True
        )
        if figures is None:
            raise ValueError(f"phase {phase} of {users} users: nothing completed in it")
        runs.phases.setdefault(phase, []).append(figures)
    spike = phase_ends[1], phase_ends[2]
    runs.parts.append(split(
        calls, poller.switch(Regime.TRANSITION, *spike), spike, marks.taken[1:3], fleet.decoders,
    ))  # fmt: skip
    if arm.switches:
        runs.switched.append(poller.first(Regime.TRANSITION, phase_ends[1]) - phase_ends[1])


def static_ratios(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return static over each arm in the saturated phase: TTFT P99, index, rate, in flight.

    `after_` is from the switch on; in arms without one, from where it would have been.
    """
    at = {row["strategy"]: row for row in rows if row["phase"] == SPIKED}
    static = at["static"]
    keys = ("ttft_p99_s", "poa_legacy", "rps", "inflight")
    return {
        f"static_over_{name}": {
            key: static[key] / row[key]
            for key in (*keys, *(f"after_{key}" for key in keys))
            if row.get(key) and static.get(key)
        }
        for name, row in at.items()
        if name != "static"
    }


def flagged_runs(ttft_p99_s: Sequence[float], factor: float = OUTLIER) -> list[int]:
    """Return indices of runs beyond `factor` medians of their strategy and phase (section 7.4)."""
    limit = factor * statistics.median(ttft_p99_s)
    return [index for index, value in enumerate(ttft_p99_s) if value > limit]


def outlier_effect(runs: Sequence[Mapping[str, Any]], factor: float = OUTLIER) -> dict[str, Any]:
    """Return the flagged runs, and the mean TTFT P99 with and without them; none is excluded."""
    values = [run["ttft_p99_s"] for run in runs]
    flags = flagged_runs(values, factor)
    unflagged = [value for index, value in enumerate(values) if index not in flags]
    return {
        "flagged": flags,
        "ttft_p99_with_s": statistics.fmean(values),
        "ttft_p99_without_s": statistics.fmean(unflagged),
    }
