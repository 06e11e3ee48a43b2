"""Experiment 2: the detector at nine levels, and the Saturated row of Table 2 held for long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from pigou.control.regimes.routing_controllers import RegimeTable
from pigou.control.saturation.regime import Regime
from pigou.experiments.detect import Poller, Watcher, as_json, config, regime_of
from pigou.experiments.fleets import Fleet, Reading
from pigou.experiments.level import Level, Seen, run
from pigou.experiments.paper import SLOPES, THRESHOLDS
from pigou.experiments.rows import Row, row
from pigou.sim.simulation import Simulation

#: Seconds for which the Saturated row is held: four times the paper's spike.
LONG = 720.0


def regimes(
    fleet: Fleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row a level, the ramp left out, with what the detector told.

    The paper printed no rates of this experiment, only slopes (`slopes`) and what was told.

    `regime_client` is the detector on the client's TTFT, `regime_server` on TTFT from sending,
    `regime_plane` what the control plane's own detector told while it ran.
    """
    thresholds = THRESHOLDS[fleet.name]
    saturation: dict[str, object] = dict(msgspec.to_builtins(config(thresholds)))
    last: tuple[int, float] | None = None
    for users in levels:
        level = Level(fleet, reading, users, ramped=False)
        watchers = [Watcher() for _ in seeds]
        seen = [
            run(level, seed, (watcher.follow,), saturation)
            for seed, watcher in zip(seeds, watchers, strict=True)
        ]
        calls = seen[0].result.calls
        found = row(
            "regimes", users, [each.measured for each in seen], seeds,
            regime_client=regime_of(calls, level.end, thresholds),
            regime_server=regime_of(calls, level.end, thresholds, server=True),
            regime_plane=max((each for _, each in watchers[0].regimes), key=_level).value,
            kv_memory=watchers[0].memory(),
        )  # fmt: skip
        ttft = found["ttft_p99_s"]
        found["slope_s"] = None if last is None else (ttft - last[1]) / (users - last[0])
        last = (users, ttft)
        yield found


def slopes(rows: Sequence[Row], fleet: Fleet) -> dict[str, Any]:
    """Return d(TTFT P99)/dC over 32..64 and 64..128, beside the paper's; None where not run."""
    at = {each["concurrency"]: each["ttft_p99_s"] for each in rows}
    found: dict[str, Any] = {}
    paper = SLOPES.get(fleet.name)
    for (low, high), printed in zip(
        pairwise((32, 64, 128)), (None, None) if paper is None else (paper.below, paper.across),
        strict=True,
    ):  # fmt: skip
        if low in at and high in at:
            found[f"slope_{low}_{high}_s"] = (at[high] - at[low]) / (high - low)
            found[f"paper_slope_{low}_{high}_s"] = printed
    return found


def saturated(
    fleet: Fleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield rows of static routing and of Table 2's controller, held for long past the knee.

    The controller is the paper's: beside the fleet, told of the client's TTFT.
    """
    for users in levels:
        level = Level(fleet, reading, users, hold=LONG, ramped=False)
        for strategy in ("static", "regime"):
            seen, pollers = [], []
            for seed in seeds:
                act = steer if strategy == "regime" else watch
                poller = Poller(THRESHOLDS[fleet.name], act)
                seen.append(run(level, seed, (poller.follow,)))
                pollers.append(poller)
            first = pollers[0]
            yield row(
                "saturated", users, _measured(seen), seeds, strategy=strategy,
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


def _measured(seen: Sequence[Seen]) -> list[Any]:
    return [each.measured for each in seen]


def _level(regime: Regime) -> int:
    return regime.level


def held(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return by what the controller changed each level: its figures over those of static."""
    found: dict[str, Any] = {}
    for one, other in pairwise(rows):
        if (one["strategy"], other["strategy"]) == ("static", "regime"):
            found[f"regime_over_static_at_{one['concurrency']}"] = {
                name: other[name] / one[name] for name in ("ttft_p99_s", "rps", "poa_legacy")
            }
    return found
