"""Oscillation under lag (the paper's section 5.2): Dynamo's +-1 rules against prices.

Load is constant and near capacity, so every reversal is the planner's own. An integrator of gain k
with lag L is stable if and only if k L < pi / 2 (Hayes 1950). `price` has a gain of at most pi / 4
/ S (S: start-up time), so it is stable below a lag of 2 S. Planners also start overloaded, where
clients give up: they must learn no speed from that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pigou.sim.arrival_rate import RateSchedule
from pigou_lab.experiments.fleets import PaperFleet, Reading
from pigou_lab.experiments.planned_fleet import (
    START_UP_S,
    PlannedRun,
    mean_row,
    planned_figures,
    supply,
)
from pigou_lab.experiments.results import Row

#: Seconds of lag.
LAGS = (0, 50, 100, 150, 200)
#: Workers at the beginning, and of the budget.
START, WORKERS = (3, 3), 6
#: Workers at the beginning where these are too few of one role.
OVERLOADED_START = (2, 4)
#: Load of three prefill workers.
UTILISATION = 0.8
#: Seconds of a run, and start-up times after which a planner is to have settled.
SECONDS, SETTLED_LAGS = 1200.0, 3.0
CONTENDERS = {
    "paper": ("dynamo-load", START), "price": ("price", START),
    "paper_overloaded": ("dynamo-load", OVERLOADED_START),
    "price_overloaded": ("price", OVERLOADED_START),
}  # fmt: skip


def oscillation(
    fleet: PaperFleet, _: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for each lag, in seconds, and planner."""
    for lag in levels:
        for name, (planner, start) in CONTENDERS.items():
            made = constant_load(fleet, planner, float(lag), start=start)
            runs = []
            for seed in seeds:
                figures = planned_figures(made.simulation(seed))
                figures["late_reversals"] = late_reversals(figures["replicas"], settled_s(lag))
                runs.append(figures)
            splits = " ".join(f"{p}+{d}" for p, d in distinct_splits(runs[0]["replicas"]))
            yield mean_row("oscillation", lag, runs, contender=name, splits=splits)


def constant_load(
    fleet: PaperFleet, planner: str, lag_s: float, seconds: float = SECONDS,
    start: tuple[int, int] = START, utilisation: float = UTILISATION,
) -> PlannedRun:  # fmt: skip
    """Return a run at constant load; `utilisation` 1 loads half the budget as prefill workers."""
    made = PlannedRun(fleet, planner, RateSchedule.of(1.0), seconds, start, WORKERS, lag_s)
    return replace(made, schedule=RateSchedule.of(utilisation * (WORKERS // 2) / made.prompt_s))


def settled_s(lag_s: float) -> float:
    """Return the seconds for a planner to settle."""
    return SETTLED_LAGS * max(START_UP_S, lag_s)


def distinct_splits(replicas: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return prefill and decode workers, starting ones counted, whenever they change."""
    splits: list[tuple[int, int]] = []
    for record in replicas:
        if not splits or splits[-1] != supply(record):
            splits.append(supply(record))
    return splits


def late_reversals(replicas: Sequence[Mapping[str, Any]], after_s: float) -> int:
    """Return how often a pool turned from growing to shrinking, or back, after a time."""
    count = 0
    for pool in (0, 1):
        last_sign, before = 0, supply(replicas[0])[pool]
        for record in replicas[1:]:
            size = supply(record)[pool]
            sign = (size > before) - (size < before)
            if sign:
                count += record["at_s"] >= after_s and sign == -last_sign
                last_sign, before = sign, size
    return count


def lag_limit_s(gain: float) -> float:
    """Return the lag below which an integrator of this gain (1/s) is stable."""
    return math.pi / 2.0 / gain


def verdict(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return the reversals of each planner after settling, by lag, and the bound on the lag."""
    reversals: dict[str, Any] = {
        f"{name}_late_reversals": {
            str(row["concurrency"]): row["late_reversals"]
            for row in rows
            if row["contender"] == name
        }
        for name in CONTENDERS
    }
    return reversals | {"price_lag_limit_s": lag_limit_s(math.pi / 4.0 / START_UP_S)}
