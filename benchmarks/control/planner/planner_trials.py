"""Planners beside one another, and beside a clairvoyant: attainment, GPU-hours and transitions.

    python -m benchmarks.control.planner.planner_trials run --side judging --traces DIR --out DIR
    python -m benchmarks.control.planner.planner_trials table --side judging --out DIR

`run` runs each cell once (workload, fleet, planner, seed) and appends it to a file of the folder;
`table` prints what is there. A planner is a name with parameters, as in `price,up=0.1`.

- Attained: share of offered requests inside both objectives.
- Perfect: GPU-hours of ceil(lambda / mu) workers that start at once (`perfect_gpu_hours`).
- Over clairvoyant: GPU-hours over those of the clairvoyant at equal attainment: the lower hull of
  the runs of its plans at several prices of a late request.
- Above: planners with more attainment at equal or fewer GPU-hours.
- Regret: GPU-hours, and late requests at `late_price`, over those of the clairvoyant's best plan.
  A planner that misses the percentile while budget is left pays for what is missing the dearest
  price of the clairvoyant's plans.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.control.planner.clairvoyant import (
    PlannedOrder,
    SchedulePlanner,
    perfect_gpu_hours,
    plan_orders,
)
from benchmarks.control.planner.trial_cases import (
    FIRST_JUDGING_SEED,
    DrawnModel,
    DrawnTrial,
    Trial,
    choosing,
    judging,
)
from benchmarks.lib.cells import Cell, fill_cells, read_cells

PLANNERS = (
    "price", "dynamo-load", "dynamo-sla", "dynamo", "apa", "kpa", "wva", "ray", "hpa-qps",
    "hpa-cpu", "heteroscale", "static",
)  # fmt: skip
#: Worker-seconds of a late request, and factors of the demand, of the clairvoyant's plans.
PLANS = ((1.0, 1.0), (2.0, 1.0), (8.0, 1.0), (30.0, 1.1))
_CLAIRVOYANT = "clairvoyant"
#: Share of requests that shall attain in every trial.
_SHARE = 0.95
#: Threshold of the garbage collector: a run leaves next to no cycles.
_GARBAGE = 50_000
#: Attainment that counts as equal.
_EQUAL = 0.0005


def trials(side: str) -> list[Trial]:
    """Return the trials of a side."""
    return choosing() if side == "choosing" else judging()


def seeds(side: str, count: int) -> list[int]:
    """Return the seeds of a side."""
    first = 1 if side == "choosing" else FIRST_JUDGING_SEED
    return list(range(first, first + count))


def run(trial: Trial, planner: str, seed: int, traces: Path) -> Cell:
    """Run a cell, and return its figures."""
    began = time.process_time()
    drawn = trial.draw(traces, seed)
    foresights = [model.foresight() for model in drawn.models]
    gpus = max(pool.gpus for seen in foresights for pool in seen.pools)
    if planner.startswith(_CLAIRVOYANT):
        figures = _clairvoyant(drawn, planner)
    else:
        figures = drawn.run(planner)
    reports = figures["models"].values()
    offered = sum(report["offered"] for report in reports)
    attained = sum(report["offered"] * report["slo"]["attained"] for report in reports)
    planned = figures["planner"]
    return {
        "trial": trial.name, "workload": trial.workload, "fleet": trial.fleet.name,
        "planner": planner, "seed": seed, "offered": offered, "attained": attained / offered,
        "gpu_hours": planned["gpu_hours"], "moves": planned["moves"],
        "reversals": planned["reversals"], "settle_s": planned["settle_s"],
        "peak_gpus": planned["peak_workers"] * gpus,
        "perfect": sum(
            perfect_gpu_hours(model.demand, seen)
            for model, seen in zip(drawn.models, foresights, strict=True)
        ),
        "took_s": time.process_time() - began,
    }  # fmt: skip


def _clairvoyant(drawn: DrawnTrial, planner: str) -> dict[str, Any]:
    _, late, margin = planner.split(":")
    orders = [
        order for model in drawn.models for order in _orders(model, float(late), float(margin))
    ]
    return drawn.run(_CLAIRVOYANT, lambda gpus: SchedulePlanner(orders, gpus))


def _orders(model: DrawnModel, late_workers_s: float, margin: float) -> list[PlannedOrder]:
    seen = model.foresight()
    gpus = max(pool.gpus for pool in seen.pools)
    return plan_orders(model.demand, seen, late_workers_s * gpus, margin)


def names(options: argparse.Namespace) -> list[str]:
    """Return the planners that are named, or all, and the clairvoyant's plans."""
    plans = [f"{_CLAIRVOYANT}:{late:g}:{margin:g}" for late, margin in PLANS]
    if options.planners:
        own = options.planners.split(";")
        return [*own, *plans] if options.clairvoyant else own
    return [*plans, *PLANNERS]


def work(options: argparse.Namespace) -> None:
    """Run the cells of a share that are not done."""
    gc.set_threshold(_GARBAGE)
    options.out.mkdir(parents=True, exist_ok=True)
    done = {(c["trial"], c["planner"], c["seed"]) for c in read_cells(options.out, options.side)}
    cells = [
        (trial, planner, seed)
        for seed in seeds(options.side, options.seeds)
        for trial in trials(options.side)
        if options.only in trial.name
        for planner in names(options)
    ]
    fill_cells(
        options.out, options.side, options.share, cells,
        lambda cell: (cell[0].name, cell[1], cell[2]) in done,
        lambda cell: run(*cell, options.traces),
    )  # fmt: skip


# --- tables ------------------------------------------------------------------------------------


class Hull:
    """GPU-hours of the clairvoyant by attainment: the lower convex hull of its runs.

    Beyond the most that it attained it is that run's; below the least, the least run's.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        points = sorted({(cell["attained"], cell["gpu_hours"]) for cell in cells})
        best = [p for p in points if not any(q[0] >= p[0] and q[1] < p[1] for q in points)]
        hull: list[tuple[float, float]] = []
        for point in best:
            while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        self.attained, self.hours = np.array(hull).T

    def at(self, attained: float) -> float:
        """Return the GPU-hours at an attainment."""
        return float(np.interp(attained, self.attained, self.hours))

    def late(self, hours: float) -> float:
        """Return the share of late requests at these GPU-hours."""
        return 1.0 - float(np.interp(hours, self.hours, self.attained))

    def late_price(self, offered: int, least: float, most: float) -> float:
        """Return the GPU-seconds a late request that make the clairvoyant keep the objective.

        The slope of the hull where it attains `_SHARE`; `least` where it does so for that, and
        `most` where no plan does.
        """
        if self.attained[0] >= _SHARE:
            return least
        if self.attained[-1] < _SHARE:
            return most
        at = int(np.searchsorted(self.attained, _SHARE))
        hours, attained = np.diff(self.hours)[at - 1], np.diff(self.attained)[at - 1]
        return float(np.clip(3600.0 * hours / attained / offered, least, most))


def regrets(row: Mapping[str, Cell]) -> dict[str, float]:
    """Return the regret of each planner of a trial in GPU-hours; empty before the clairvoyant."""
    hull = hull_of(row)
    if hull is None:
        return {}
    cell = next(iter(row.values()))
    trial = next(t for t in [*choosing(), *judging()] if t.name == cell["trial"])
    gpus = max(setup.tp for setup in trial.fleet.setups[: len(trial.loads)])
    budget = trial.fleet.max_workers * len(trial.loads) * gpus
    most = max(late for late, _ in PLANS) * gpus
    price = hull.late_price(cell["offered"], min(late for late, _ in PLANS) * gpus, most)

    def cost(cell: Cell) -> float:
        missing = max(_SHARE - cell["attained"], 0.0) if cell["peak_gpus"] < budget else 0.0
        late_gpu_s = price * (1.0 - cell["attained"]) + max(most - price, 0.0) * missing
        return float(cell["gpu_hours"] + cell["offered"] * late_gpu_s / 3600.0)

    best = min(cost(cell) for name, cell in row.items() if name.startswith(_CLAIRVOYANT))
    return {
        name: cost(cell) - best for name, cell in row.items() if not name.startswith(_CLAIRVOYANT)
    }


def _is_above(
    one: tuple[float, float], middle: tuple[float, float], other: tuple[float, float]
) -> bool:
    """Whether the middle point lies on or above the line through the others."""
    slope = (other[1] - one[1]) / (other[0] - one[0])
    return middle[1] >= one[1] + slope * (middle[0] - one[0]) - 1e-12


def by_trial(cells: Sequence[Cell]) -> dict[tuple[str, int], dict[str, Cell]]:
    """Return cells by trial and seed, then by planner."""
    table: dict[tuple[str, int], dict[str, Cell]] = defaultdict(dict)
    for cell in cells:
        table[cell["trial"], cell["seed"]][cell["planner"]] = cell
    return dict(table)


def hull_of(row: Mapping[str, Cell]) -> Hull | None:
    """Return the clairvoyant's hull of a trial; None before it has run."""
    plans = [cell for name, cell in row.items() if name.startswith(_CLAIRVOYANT)]
    return Hull(plans) if plans else None


def above(row: Mapping[str, Cell], planner: str) -> list[str]:
    """Return the planners with more attainment at equal or fewer GPU-hours."""
    own = row[planner]
    return [
        name
        for name, cell in row.items()
        if not name.startswith((_CLAIRVOYANT, planner.partition(",")[0]))
        and cell["attained"] > own["attained"] + _EQUAL
        and cell["gpu_hours"] <= own["gpu_hours"]
    ]


def show(options: argparse.Namespace) -> None:
    """Print the tables."""
    cells = [c for c in read_cells(options.out, options.side) if options.only in c["trial"]]
    table = by_trial(cells)
    planners = [
        name for name in dict.fromkeys(cell["planner"] for cell in cells)
        if not name.startswith(_CLAIRVOYANT)
    ]  # fmt: skip
    print(
        f"{options.side}: attained %, GPU-hours, over clairvoyant, regret, of each trial and seed"
    )
    for key, row in table.items():
        hull = hull_of(row)
        first = next(iter(row.values()))
        plans = "" if hull is None else "; ".join(
            f"{100 * a:.1f} {h:.2f}" for a, h in zip(hull.attained, hull.hours, strict=True)
        )  # fmt: skip
        print(f"\n{key[0]}, seed {key[1]}: {first['offered']} requests, perfect "
              f"{first['perfect']:.2f}; clairvoyant {plans}")  # fmt: skip
        for name in planners:
            if name in row:
                print("  " + _line(row, name, hull))
    _means(table, planners)


def _line(row: Mapping[str, Cell], name: str, hull: Hull | None) -> str:
    cell, regret = row[name], regrets(row).get(name, float("nan"))
    ratio = cell["gpu_hours"] / hull.at(cell["attained"]) if hull else float("nan")
    better = above(row, name)
    return (
        f"{name:<24}{100 * cell['attained']:6.1f}{cell['gpu_hours']:8.2f}{ratio:7.2f}{regret:7.2f}"
        f"  settle {cell['settle_s']:5.0f} s, peak {cell['peak_gpus']:3d}, "
        f"moves {cell['moves']:3d}, reversals {cell['reversals']:2d}"
        + (f"  above: {', '.join(better)}" if better else "")
    )


def _means(table: Mapping[tuple[str, int], Mapping[str, Cell]], planners: Sequence[str]) -> None:
    print(f"\nmeans   {'planner':<24}{'trials':>7}{'attained':>9}{'hours/perfect':>14}"
          f"{'over clair.':>12}{'worst':>7}{'late-clair':>11}{'settle s':>9}{'moves':>6}"
          f"{'reversals':>10}{'overshoot':>10}{'above':>6}{'regret':>8}{'least':>6}")  # fmt: skip
    paid = [regrets(row) for row in table.values()]
    for name in planners:
        regret = [one[name] for one in paid if name in one] or [float("nan")]
        least = sum(name in one and one[name] <= min(one.values()) + 1e-9 for one in paid)
        rows = [row for row in table.values() if name in row]
        own = [row[name] for row in rows]
        hulls = [hull_of(row) for row in rows]
        pairs = [(cell, hull) for cell, hull in zip(own, hulls, strict=True) if hull is not None]
        ratios = [cell["gpu_hours"] / hull.at(cell["attained"]) for cell, hull in pairs] or [0.0]
        late = [1.0 - cell["attained"] - hull.late(cell["gpu_hours"]) for cell, hull in pairs]
        overshoot = [
            cell["peak_gpus"] / _peak(row) - 1.0 for cell, row in zip(own, rows, strict=True)
        ]
        print(
            f"        {name:<24}{len(own):>7}{_mean(own, 'attained'):>9.3f}"
            f"{statistics.fmean(c['gpu_hours'] / c['perfect'] for c in own):>14.2f}"
            f"{statistics.fmean(ratios):>12.3f}{max(ratios):>7.2f}"
            f"{statistics.fmean(late or [0.0]):>11.3f}{_mean(own, 'settle_s'):>9.0f}"
            f"{_mean(own, 'moves'):>6.1f}{sum(c['reversals'] for c in own):>10}"
            f"{statistics.fmean(overshoot):>10.2f}{sum(bool(above(r, name)) for r in rows):>6}"
            f"{statistics.fmean(regret):>8.3f}{least:>6}"
        )


def _mean(cells: Sequence[Cell], figure: str) -> float:
    return statistics.fmean(cell[figure] for cell in cells)


def _peak(row: Mapping[str, Cell]) -> float:
    """Return the peak GPUs of the clairvoyant's costliest plan; the smallest of all without it."""
    plans = [c for name, c in row.items() if name.startswith(_CLAIRVOYANT)] or list(row.values())
    return float(max(cell["peak_gpus"] for cell in plans))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--side", choices=("choosing", "judging"), default="choosing")
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--planners", default="", help="names, by semicolons; all where left out")
    parser.add_argument("--clairvoyant", action="store_true", help="besides the planners named")
    parser.add_argument("--only", default="", help="trials whose name contains this")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--share", default="0/1")
    options = parser.parse_args()
    if options.what == "run" and options.traces is None:
        parser.error("--traces names the folder of the traces")
    (work if options.what == "run" else show)(options)


if __name__ == "__main__":
    main()
