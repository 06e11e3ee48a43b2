"""Experiment 2: the detector at nine levels; the knee; the Saturated row of Table 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pigou.control.saturation.regime import Regime
from pigou.sim.simulation import Simulation
from pigou_lab.experiments.detect import Poller, Watcher, as_json, detector_values, regime_of
from pigou_lab.experiments.fleets import POOL, PaperFleet, Reading
from pigou_lab.experiments.level import Level, LevelRun, run
from pigou_lab.experiments.paper import EXPERIMENT1, GAPS, RAMP_S, SLOPES, THRESHOLDS
from pigou_lab.experiments.results import Row, make_row
from pigou_lab.experiments.window import columns, split
from pigou_lab.routing_controllers import RegimeTable

#: Column of the time after a switch.
AFTER = ("after_ttft_p99_s",)
#: Seconds for which the Saturated row is held: four times the paper's spike.
LONG_S = 720.0


def regimes(
    fleet: PaperFleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row per level, without the ramp: the detector's regime on client and server TTFT."""
    thresholds = THRESHOLDS[fleet.name]
    saturation = detector_values(thresholds)
    last: tuple[int, float] | None = None
    for users in levels:
        level = Level(fleet, reading, users, ramped=False)
        watchers = [Watcher() for _ in seeds]
        level_runs = [
            run(level, seed, (watcher.follow,), saturation)
            for seed, watcher in zip(seeds, watchers, strict=True)
        ]
        calls = level_runs[0].result.runs
        row = make_row(
            "regimes", users, [level_run.measured for level_run in level_runs], seeds,
            regime_client=regime_of(calls, level.end, thresholds),
            regime_server=regime_of(calls, level.end, thresholds, server=True),
            regime_plane=max((level_run for _, level_run in watchers[0].regimes), key=_level).value,
            kv_memory=watchers[0].memory(),
        )  # fmt: skip
        ttft = row["ttft_p99_s"]
        row["slope_s"] = None if last is None else (ttft - last[1]) / (users - last[0])
        last = (users, ttft)
        yield row


def slopes(rows: Sequence[Row], fleet: PaperFleet) -> dict[str, Any]:
    """Return d(TTFT P99)/dC over 32..64 and 64..128, beside the paper's; None where not run."""
    at = {row["concurrency"]: row["ttft_p99_s"] for row in rows}
    differences: dict[str, Any] = {}
    paper = SLOPES.get(fleet.name)
    for (low, high), printed in zip(
        pairwise((32, 64, 128)), (None, None) if paper is None else (paper.below, paper.across),
        strict=True,
    ):  # fmt: skip
        if low in at and high in at:
            differences[f"slope_{low}_{high}_s"] = (at[high] - at[low]) / (high - low)
            differences[f"paper_slope_{low}_{high}_s"] = printed
    return differences


def saturated(
    fleet: PaperFleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield rows of static routing and of Table 2's controller, held long past the knee."""
    for users in levels:
        level = Level(fleet, reading, users, hold_s=LONG_S, ramped=False)
        for strategy in ("static", "regime"):
            level_runs, pollers = [], []
            for seed in seeds:
                act = steer if strategy == "regime" else watch
                poller = Poller(THRESHOLDS[fleet.name], act)
                level_runs.append(run(level, seed, (poller.follow,)))
                pollers.append(poller)
            first = pollers[0]
            window = RAMP_S, level.end
            parts = [
                split(made.result.runs, poller.switch(Regime.SATURATED, *window), window,
                      made.gaps, fleet.decoders)
                for made, poller in zip(level_runs, pollers, strict=True)
            ]  # fmt: skip
            yield make_row(
                "saturated", users, _measured(level_runs), seeds, per_seed=columns(parts),
                strategy=strategy,
                saturated_from_s=first.first(Regime.SATURATED), regimes=as_json(first.switches),
            )  # fmt: skip


def steer(simulation: Simulation, regime: Regime) -> None:
    """Set the router to Table 2's row of a regime."""
    setting = RegimeTable().setting(regime)
    simulation.fleet.plane.router.tune(
        setting.temperature, {"overlap_weight": setting.overlap_weight}
    )


def watch(simulation: Simulation, regime: Regime) -> None:
    """Leave the router alone."""


def _measured(level_runs: Sequence[LevelRun]) -> list[Any]:
    return [level_run.measured for level_run in level_runs]


def _level(regime: Regime) -> int:
    return regime.level


def held_ratios(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return the controller's figures over those of static, by level."""
    ratios: dict[str, Any] = {}
    for one, other in pairwise(rows):
        if (one["strategy"], other["strategy"]) == ("static", "regime"):
            ratios[f"regime_over_static_at_{one['concurrency']}"] = {
                name: other[name] / one[name]
                for name in ("ttft_p99_s", "rps", "poa_legacy", "after_ttft_p99_s", "after_rps")
                if other.get(name) and one.get(name)
            }
    return ratios


#: The paper's three levels about the knee, and what lies between the last two.
KNEE_LEVELS = (32, 64, *range(96, 129, 4))
#: TTFT P99 over that of the first level from which a level is past the knee.
KNEE_FACTOR = 5.0


def knee(
    fleet: PaperFleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row a level, as of Experiment 1, with the finite difference from the one before."""
    last: tuple[int, float] | None = None
    for users in levels:
        level = Level(fleet, reading, users)
        figures = [run(level, seed).measured for seed in seeds]
        row = make_row("knee", users, figures, seeds, EXPERIMENT1[fleet.name].get(users))
        ttft = row["ttft_p99_s"]
        row["slope_s"] = None if last is None else (ttft - last[1]) / (users - last[0])
        last = (users, ttft)
        yield row


def knee_of(rows: Sequence[Row], fleet: PaperFleet, reading: Reading) -> Mapping[str, Any]:
    """Return the first level past the knee, and the predicted knee."""
    first = rows[0]["ttft_p99_s"]
    past = [row["concurrency"] for row in rows if row["ttft_p99_s"] > KNEE_FACTOR * first]
    return {
        "first_past_knee": min(past, default=None),
        "predicted_knee": predicted_knee(fleet, reading),
        **slopes(rows, fleet),
    }


def predicted_knee(fleet: PaperFleet, reading: Reading) -> float | None:
    """Return the users at which a bottleneck saturates (Denning and Buzen 1978), or None."""
    if reading == "client-pool":
        return float(POOL)
    if reading == "fair":
        return None
    law = fleet.law(reading)
    users = 1.0
    for _ in range(100):
        decoding = users / fleet.decoders
        seconds = fleet.base + GAPS * (law.itl_a + law.itl_b * decoding)
        users = seconds / law.prefill
    return users
