"""Experiment 4: grids of temperature and overlap weight, and whether cells differ at all."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from scipy import stats

from pigou_lab.experiments.fleets import PaperFleet, PolicySetting, Reading
from pigou_lab.experiments.level import Level, run
from pigou_lab.experiments.paper import GRIDS, OVERLAP_WEIGHTS, TEMPERATURES, Figures
from pigou_lab.experiments.results import Row, make_row

HOLD_S = 180.0
#: Beyond the paper's sweep, which ended at 1.
LARGE_WEIGHTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
#: Numbers of different prompts: the paper's five, and more than any worker holds at first.
TEMPLATES = (5, 500)


def grid(
    fleet: PaperFleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row a cell, the ramp left out."""
    for users in levels:
        printed = GRIDS[fleet.name].get(users)
        for (i, tau), (j, omega) in product(enumerate(TEMPERATURES), enumerate(OVERLAP_WEIGHTS)):
            paper = None
            if printed is not None and printed.cells:
                paper = Figures(poa_legacy=printed.cells[i][j], source=printed.source)
            level = Level(fleet, reading, users, HOLD_S, False, PolicySetting(tau, omega))
            figures = [run(level, seed).measured for seed in seeds]
            name = "pareto-below" if users <= 64 else "pareto-at"
            yield make_row(
                name, users, figures, seeds, paper, temperature=tau, overlap_weight=omega
            )


def cells(rows: Sequence[Row], fleet: PaperFleet) -> Mapping[str, Any]:
    """Return the grid's mean and spread, and whether cells differ beyond seeds."""
    values = [row["poa_legacy"] for row in rows]
    ttfts = [row["ttft_p99_s"] for row in rows]
    printed = GRIDS[fleet.name].get(rows[0]["concurrency"])
    summary: dict[str, Any] = {
        "poa_mean": statistics.fmean(values),
        "poa_spread": statistics.stdev(values),
        "ttft_p99_least_s": min(ttfts),
        "ttft_p99_most_s": max(ttfts),
        "rps_mean": statistics.fmean(row["rps"] for row in rows),
        **{
            f"variance_{name}": variance(rows, name) for name in ("poa_legacy", "ttft_p99_s", "rps")
        },
    }
    if printed is not None:
        low, high = printed.ttft_p99_s or (None, None)
        summary["paper"] = {
            "poa_mean": printed.mean, "poa_spread": printed.sd, "rps_mean": printed.rps,
            "ttft_p99_least_s": low, "ttft_p99_most_s": high, "source": printed.source,
        }  # fmt: skip
    return summary


def variance(rows: Sequence[Row], name: str) -> dict[str, float | None] | None:
    """Return a two-way analysis of variance of rows, with seeds as blocks; None for single runs."""
    values = np.array([[seed_run[name] for seed_run in row["runs"]] for row in rows])
    count, seeds = values.shape
    if seeds < 2:
        return None
    means = values.mean(axis=1)
    cells = seeds * float(((means - means.mean()) ** 2).sum())
    rest = values - means[:, None] - values.mean(axis=0) + values.mean()
    residual, tolerance = float((rest**2).sum()), 1e-18 * float((values**2).sum())
    f = None if residual <= tolerance else cells * (seeds - 1) / residual
    if cells <= tolerance:
        f, p = 0.0, 1.0
    elif f is None:
        p = 0.0
    else:
        p = float(stats.f.sf(f, count - 1, (count - 1) * (seeds - 1)))
    within = float(np.sqrt(values.var(axis=1, ddof=1).mean()))
    return {"between": float(means.std(ddof=1)), "seeds": within, "f": f, "p": p}


def weights(
    fleet: PaperFleet, reading: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield rows of overlap weights beyond 1, for few and for many different prompts."""
    for templates, users, omega in product(TEMPLATES, levels, LARGE_WEIGHTS):
        level = Level(
            fleet, reading, users, HOLD_S, False, PolicySetting(0.0, omega), templates=templates
        )  # fmt: skip
        runs = [run(level, seed) for seed in seeds]
        shares = []
        for level_run in runs:
            counts = _shares(
                [
                    request_run.decode_worker
                    for request_run in level_run.result.runs
                    if request_run.decode_worker
                ]
            )
            shares.append(max(counts) * fleet.decoders)
        yield make_row(
            "overlap-weights", users, [level_run.measured for level_run in runs], seeds,
            per_seed={"busiest": shares}, overlap_weight=omega, templates=templates,
        )  # fmt: skip


def _shares(workers: Sequence[str]) -> list[float]:
    _, counts = np.unique(np.array(workers), return_counts=True)
    shares: list[float] = (counts / counts.sum()).tolist()
    return shares


def effects(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return, for each level and number of prompts, whether the weight makes a difference."""
    effects_of: dict[str, Any] = {}
    for templates, users in sorted({(row["templates"], row["concurrency"]) for row in rows}):
        subset = [
            row for row in rows
            if (row["templates"], row["concurrency"]) == (templates, users)
        ]  # fmt: skip
        effects_of[f"{templates}_templates_at_{users}"] = {
            "poa_least": min(row["poa_legacy"] for row in subset),
            "poa_most": max(row["poa_legacy"] for row in subset),
            "e2e": variance(subset, "e2e_mean_s"),
            "poa": variance(subset, "poa_legacy"),
        }
    return effects_of
