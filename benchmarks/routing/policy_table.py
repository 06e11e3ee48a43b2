"""Every routing policy on every workload: wins and losses, with intervals over seeds.

    python -m benchmarks.routing.policy_table --traces FOLDER --out FOLDER [--seeds 3] [--share 0/2]
    python -m benchmarks.routing.policy_table --out FOLDER --print

FOLDER of the traces has `mooncake/` and `azure/`, and, unpacked, `agent-sessions/` and
`servegen-deepseek-r1/`. Each cell (workload, policy, seed) is appended to
`cells-SHARE.jsonl` as it is done, and not run again. `--share i/n` runs every n-th cell, so that
several processes can work at once. With `--cold` the workers are such as tell nothing of their
speed: what a vLLM does. With `--requests N` open loops have as many, and there are no others.
`--print` makes `results.json`, and prints the whole table.

Where there are prefill workers, the thresholds of conditional disaggregation that
`pigou experiment toll` has are there as well: of prompts that wait, and, where these are of all
lengths, of batches of 2,048 tokens.

Attainment is of all requests that were offered: those that were served with both latencies
within what the workload asks for. `toll` is judged by the baseline with the best attainment of
each workload (ties: the higher rate): it is worse where the 95% interval of the paired
differences over seeds lies wholly on the worse side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from benchmarks.lib.cells import Cell, fill_cells, read_cells
from benchmarks.routing.policy_workloads import REQUESTS, Scenario, scenarios
from pigou.control.routing.policy import GROUP
from pigou.engine.startup_profiling import warm_up
from pigou.request import SECOND
from pigou_lab.experiments.prices import THRESHOLDS, Contender, paired, threshold

#: Shown and judged; the sign says which way is better.
JUDGED = {"attainment": 1.0, "rps": 1.0, "ttft_p99_s": -1.0}
POA = ("whole", "queueing", "routing", "prefill_decode")
COLUMNS = ("attainment", "rps", "ttft_p99_s", "itl_p99_s", "e2e_mean_s", *(f"poa_{p}" for p in POA))


def contenders(scenario: Scenario) -> list[Contender]:
    """Return who is tried: all policies as they are, and thresholds of the prefill queue."""
    found = [Contender(name, name) for name in sorted(entry_points(group=GROUP).names)]
    if scenario.batch:
        found += [threshold(each, scenario.batch) for each in THRESHOLDS]
    return found


def run(scenario: Scenario, traces: Path, contender: Contender, seed: int) -> Cell:
    """Run a cell, and return its figures."""
    began = time.perf_counter()
    result = scenario.make(traces, contender.policy, contender.params, seed).run()
    found = result.document()
    well = sum(
        call.first_token_ns - call.intended_ns <= scenario.ttft_s * SECOND
        and call.last_token_ns - call.first_token_ns
        <= scenario.tpot_s * SECOND * max(1, call.output_tokens - 1)
        for call in result.done
    )
    return {
        "workload": scenario.name, "policy": contender.name, "seed": seed,
        "offered": found["offered"], "completed": found["completed"],
        "attainment": well / found["offered"], "rps": found["throughput_rps"],
        "ttft_p99_s": found["ttft_s"]["p99"], "itl_p99_s": found["itl_s"]["p99"],
        "e2e_mean_s": found["e2e_s"]["mean"], "poa": found["poa"],
        "took_s": time.perf_counter() - began,
    }  # fmt: skip


def work(traces: Path, out: Path, seeds: int, share: str, tried: Sequence[Scenario]) -> None:
    """Run the cells of a share that are not done."""
    out.mkdir(parents=True, exist_ok=True)
    done = {(cell["workload"], cell["policy"], cell["seed"]) for cell in read_cells(out, "cells")}
    warm_up()
    everything = [
        (scenario, contender, seed)
        for seed in range(1, seeds + 1)
        for scenario in tried
        for contender in contenders(scenario)
    ]
    fill_cells(
        out, "cells", share, everything,
        lambda cell: (cell[0].name, cell[1].name, cell[2]) in done,
        lambda cell: run(cell[0], traces, *cell[1:]),
    )  # fmt: skip


def table(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return a row a workload: each policy's figures, and how toll compares.

    Seeds that not all policies of a workload have are left out.
    """
    by: dict[str, dict[str, dict[int, Cell]]] = defaultdict(lambda: defaultdict(dict))
    for each in cells:
        by[each["workload"]][each["policy"]][each["seed"]] = each
    for found in by.values():
        common = set.intersection(*(set(seeds) for seeds in found.values()))
        for policy, seeds in found.items():
            found[policy] = {seed: each for seed, each in seeds.items() if seed in common}
    return [
        {"workload": name, "policies": {p: _means(list(s.values())) for p, s in found.items()},
         **_verdict(found)}
        for name, found in by.items()
        if all(found.values())
    ]  # fmt: skip


def _means(cells: Sequence[Cell]) -> dict[str, Any]:
    found: dict[str, Any] = {"seeds": len(cells)}
    for name in (*JUDGED, "itl_p99_s", "e2e_mean_s"):
        values = [each[name] for each in cells if each[name] is not None]
        found[name] = statistics.fmean(values) if values else None
    for name in POA:
        values = [each["poa"][name] for each in cells if each["poa"][name] is not None]
        found[f"poa_{name}"] = statistics.fmean(values) if values else None
    return found


def _verdict(found: Mapping[str, Mapping[int, Cell]]) -> dict[str, Any]:
    """Compare toll with the baseline of the best attainment, over the seeds that both have."""
    toll = found.get("toll", {})
    others = {name: seeds for name, seeds in found.items() if name != "toll"}
    if not toll or not others:
        return {"best": None, "differences": {}, "worse": []}

    def rank(name: str) -> tuple[float, float]:
        cells = others[name].values()
        return tuple(statistics.fmean(c[k] for c in cells) for k in ("attainment", "rps"))  # type: ignore[return-value]

    best = max(others, key=rank)
    seeds = sorted(set(toll) & set(others[best]))
    differences, worse = {}, []
    for name, sign in JUDGED.items():
        one, other = ([cells[seed][name] for seed in seeds] for cells in (toll, others[best]))
        differences[name] = paired(one, other)
        _, low, high = differences[name]
        if len(seeds) > 1 and (high < 0 if sign > 0 else low > 0):
            worse.append(name)
    return {"best": best, "differences": differences, "worse": worse}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print all rows."""
    for row in rows:
        print(f"\n{row['workload']}")
        heads = ("attained", "rps", "TTFT P99", "ITL P99", "e2e s", "PoA", "queue", "route", "P/D")
        print(f"  {'policy':<20}{'seeds':>6}" + "".join(f"{each:>9}" for each in heads))
        ordered = sorted(row["policies"].items(), key=lambda item: -item[1]["attainment"])
        for name, each in ordered:
            figures = [each[column] for column in COLUMNS]
            print(f"  {name:<20}{each['seeds']:>6}" + "".join(_cell(one) for one in figures))
        if row["best"]:
            parts = ", ".join(
                f"{name} {mean:+.3g} [{low:+.3g}, {high:+.3g}]"
                for name, (mean, low, high) in row["differences"].items()
            )
            print(
                f"  toll less {row['best']}: {parts}: worse in {', '.join(row['worse']) or 'none'}"
            )


def _cell(value: float | None) -> str:
    return f"{'-':>9}" if value is None else f"{value:>9.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--cold", action="store_true", help="workers tell nothing of their speed")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of an open loop")
    parser.add_argument("--print", action="store_true", dest="shown")
    options = parser.parse_args()
    if not options.shown:
        if options.traces is None:
            parser.error("--traces names the folder of the traces; give it, or --print")
        tried = scenarios(options.cold, options.requests)
        work(options.traces, options.out, options.seeds, options.share, tried)
        return
    rows = table(read_cells(options.out, "cells"))
    (options.out / "results.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
