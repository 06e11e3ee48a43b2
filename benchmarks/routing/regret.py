"""Regret of every routing policy: its mean time, TTFT P99 and TPOT P99 over the best one's there.

    python -m benchmarks.routing.regret run --side choosing --traces FOLDER --out FOLDER
        [--policies toll,llm-d] [--seeds 2] [--share 0/2]
    python -m benchmarks.routing.regret table --side choosing --out FOLDER [--policies ...]
    python -m benchmarks.routing.regret capacity

FOLDER of the traces has `mooncake/` and `azure/`, and, unpacked, `agent-sessions/` and
`servegen-deepseek-r1/`. `run` appends each cell (workload, policy, seed) to `SIDE-SHARE.jsonl` as
it is done, and runs none again. `--share i/n` runs every n-th cell, so that several processes can
work at once. A policy may carry parameters (`toll:urgency=0`), among them `chunk`, the tokens per
step of workers that decode, and a term of `toll` may be left out (`toll-toll_queue`). The regret of
a policy on a workload is the mean over seeds of its figure, over the least such mean of all
policies that are named. It is 1 for the best.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from benchmarks.lib.cells import Cell, fill_cells, read_cells
from benchmarks.routing.regret_families import (
    FIRST_JUDGING_SEED,
    Workload,
    capacity_run,
    choosing,
    judging,
)
from pigou.control.routing.policy import GROUP, CostTable, RequestView, RoutingPolicy, override
from pigou.control.routing.toll.policy import Toll
from pigou.control.routing.toll.terms import PARTS
from pigou.control.routing.view import Candidates, FleetView
from pigou.engine.startup_profiling import warm_up

FIGURES = ("e2e_mean_s", "ttft_p99_s", "tpot_p99_s")
Regrets = dict[str, dict[str, float]]


def workloads(side: str) -> list[Workload]:
    """Return the workloads of a side."""
    return choosing() if side == "choosing" else judging()


def seeds(side: str, count: int) -> list[int]:
    """Return the seeds of a side."""
    first = 1 if side == "choosing" else FIRST_JUDGING_SEED
    return list(range(first, first + count))


def policies(names: str) -> list[str]:
    """Return the policies that are named; all that are installed where none is."""
    return names.split(",") if names else sorted(entry_points(group=GROUP).names)


def variant(text: str) -> tuple[str, dict[str, Any], RoutingPolicy | None]:
    """Return a policy's name, its parameters, and its object where terms are left out."""
    name, _, given = text.partition(":")
    params = dict(item.split("=", 1) for item in given.split(";") if item)
    base, _, term = name.partition("-")
    if base == "toll" and term:
        return base, {}, override(TollWithout(term), params)
    return name, params, None


class TollWithout(Toll):
    """`toll` without one of its terms."""

    def __init__(self, term: str) -> None:
        super().__init__()
        self.row = PARTS.index(term)

    def parts(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> CostTable:
        """Return the parts, of which one is 0, and their sum."""
        table = super().parts(request, fleet, candidates)
        table.rows[self.row] = 0.0
        table.rows[-1] = table.rows[:-1].sum(axis=0)
        return table


def run(workload: Workload, traces: Path, text: str, seed: int) -> Cell:
    """Run a cell, and return its figures."""
    began = time.perf_counter()
    name, params, policy = variant(text)
    result = workload.make(traces, name, params, seed, policy).run()
    document = result.document()
    return {
        "workload": workload.name, "policy": text, "seed": seed, "offered": document["offered"],
        "completed": document["completed"], "hits": document["prefix_hit_ratio"],
        "e2e_mean_s": document["e2e_s"]["mean"], "ttft_p99_s": document["ttft_s"]["p99"],
        "ttft_mean_s": document["ttft_s"]["mean"], "tpot_p99_s": document["tpot_s"]["p99"],
        "rps": document["throughput_rps"],
        "took_s": time.perf_counter() - began,
    }  # fmt: skip


def work(options: argparse.Namespace) -> None:
    """Run the cells of a share that are not done."""
    options.out.mkdir(parents=True, exist_ok=True)
    done = {(c["workload"], c["policy"], c["seed"]) for c in read_cells(options.out, options.side)}
    cells = [
        (workload, policy, seed)
        for seed in seeds(options.side, options.seeds)
        for workload in workloads(options.side)
        for policy in policies(options.policies)
        if options.only in workload.name
    ]
    warm_up()
    fill_cells(
        options.out, options.side, options.share, cells,
        lambda cell: (cell[0].name, *cell[1:]) in done,
        lambda cell: run(cell[0], options.traces, *cell[1:]),
    )  # fmt: skip


def means(cells: Sequence[Cell], figure: str) -> dict[str, dict[str, float]]:
    """Return the mean over seeds of a figure, by workload and policy.

    Seeds that not all policies of a workload have are left out.
    """
    by: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for cell in cells:
        by[cell["workload"]][cell["policy"]][cell["seed"]] = cell[figure]
    table: dict[str, dict[str, float]] = {}
    for workload, cells_of in by.items():
        common = set.intersection(*(set(values) for values in cells_of.values()))
        if common:
            table[workload] = {
                policy: statistics.fmean(values[seed] for seed in sorted(common))
                for policy, values in cells_of.items()
            }
    return table


def regrets(table: Mapping[str, Mapping[str, float]]) -> Regrets:
    """Return each policy's figure over the least of the workload, by workload and policy."""
    return {
        workload: {policy: value / min(row.values()) for policy, value in row.items()}
        for workload, row in table.items()
    }


def show(options: argparse.Namespace) -> None:
    """Print the tables: worst and mean regret of each policy, and one line a workload."""
    names = policies(options.policies)
    cells = [c for c in read_cells(options.out, options.side) if c["policy"] in names]
    for figure in FIGURES:
        table = means(cells, figure)
        ratios = regrets(table)
        print(f"\n{options.side}: regret of {figure}, {len(ratios)} workloads")
        print(f"  {'policy':<28}{'mean':>8}{'worst':>8}  where")
        rows = []
        for policy in names:
            own = {w: row[policy] for w, row in ratios.items() if policy in row}
            if own:
                worst = max(own, key=lambda w: own[w])
                rows.append((statistics.fmean(own.values()), own[worst], policy, worst))
        for mean, most, policy, worst in sorted(rows):
            print(f"  {policy:<28}{mean:>8.3f}{most:>8.3f}  {worst}")
        _show_workloads(table, ratios, names)


def _show_workloads(
    table: Mapping[str, Mapping[str, float]], ratios: Regrets, names: Sequence[str]
) -> None:
    tolls = [name for name in names if name.startswith("toll")]
    heads = "".join(f"{name[:17]:>18}" for name in tolls)
    print(f"\n  {'workload':<36}{'best':>20}{'seconds':>9}{heads}")
    for workload, row in table.items():
        best = min(row, key=lambda policy: row[policy])
        own = "".join(f"{ratios[workload].get(name, float('nan')):>18.3f}" for name in tolls)
        print(f"  {workload:<36}{best:>20}{row[best]:>9.3f}{own}")


def capacity() -> None:
    """Print the mean time of all policies by rate, for `CAPACITY_RPS`."""
    warm_up()
    for rate in (10.0, 20.0, 25.0, 30.0, 35.0, 40.0, 45.0, 50.0):
        row = {
            name: capacity_run(rate, name).run().document()["e2e_s"]["mean"]
            for name in policies("")
        }
        best = min(row, key=lambda name: row[name])
        print(f"{rate:5.1f}/s  {row[best]:7.3f} s  {best}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table", "capacity"))
    parser.add_argument("--side", choices=("choosing", "judging"), default="choosing")
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--policies", default="", help="names, by commas; all where left out")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--share", default="0/1")
    options = parser.parse_args()
    if options.what == "capacity":
        capacity()
        return
    if options.out is None or (options.what == "run" and options.traces is None):
        parser.error("--out names the folder of the cells, and --traces that of the traces")
    (work if options.what == "run" else show)(options)


if __name__ == "__main__":
    main()
