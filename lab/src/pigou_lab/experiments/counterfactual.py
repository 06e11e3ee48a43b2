"""Routers without state: under the paper's cost model, and on the fleet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.games.price_of_anarchy import legacy_costs, legacy_optimum
from pigou_lab.experiments.fleets import PaperFleet, PolicySetting, Reading
from pigou_lab.experiments.level import Level, run
from pigou_lab.experiments.paper import COUNTERFACTUAL, LEVELS
from pigou_lab.experiments.results import Row, make_row

#: Policies of the router, and the paper's own ("": Eq. 1).
POLICIES = ("", "random", "round-robin", "power-of-two", "least-loaded", "toll")
#: Draws of the random ones.
DRAWS = 200


def counterfactual(
    fleet: PaperFleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield rows of the fleet under each policy, with the ramp left out."""
    for users in levels:
        for policy in POLICIES:
            level = Level(fleet, reading, users, 120.0, False, PolicySetting(policy=policy))
            figures = [run(level, seed).measured for seed in seeds]
            yield make_row("counterfactual", users, figures, seeds, policy=policy or "eq1")


def static(fleet: PaperFleet) -> list[dict[str, Any]]:
    """Return static assignments over the Hungarian optimum, per level of the paper (Eq. 12)."""
    levels = []
    for users in LEVELS:
        optimum = legacy_optimum(fleet.decoders, users)
        ratios = {
            name: float(np.mean([_cost(counts) for counts in drawn])) / optimum
            for name, drawn in _assigned(fleet.decoders, users).items()
        }
        levels.append({"concurrency": users, **ratios})
    return levels


def summary(rows: Sequence[Row], fleet: PaperFleet) -> Mapping[str, Any]:
    """Return the static counterfactual, and the spread of the fleet's figures over policies."""
    assigned = static(fleet)
    max_excess = max(
        value - 1.0
        for level in assigned
        if level["concurrency"] >= 8
        for name, value in level.items()
        if name != "concurrency"
    )
    max_over_min = {
        users: {
            name: max(level[name] for level in rows if level["concurrency"] == users)
            / min(level[name] for level in rows if level["concurrency"] == users)
            for name in ("e2e_mean_s", "rps", "poa_legacy")
        }
        for users in dict.fromkeys(level["concurrency"] for level in rows)
    }
    return {
        "static": assigned,
        "most_over_optimum_from_8": max_excess,
        "paper_over_optimum": COUNTERFACTUAL,
        "most_over_least_of_policies": {
            str(users): ratios for users, ratios in max_over_min.items()
        },
    }


def _assigned(workers: int, users: int) -> dict[str, list[NDArray[np.int64]]]:
    rng = np.random.default_rng(0)
    even = np.bincount(np.arange(users) % workers, minlength=workers)
    random, two = [], []
    for _ in range(DRAWS):
        random.append(np.bincount(rng.integers(workers, size=users), minlength=workers))
        counts = np.zeros(workers, dtype=np.int64)
        for _ in range(users):
            one, other = rng.integers(workers, size=2)
            counts[one if counts[one] <= counts[other] else other] += 1
        two.append(counts)
    return {"round_robin": [even], "random": random, "two_choices": two}


def _cost(counts: NDArray[np.int64]) -> float:
    return math.fsum(float(legacy_costs(int(n)).sum()) for n in counts.tolist())
