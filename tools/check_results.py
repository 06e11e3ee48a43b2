"""Run a sample of the simulated figures of docs/results again, and compare them with the pages.

python -m tools.check_results [--only PATTERN] [--list]

Each check runs the command that its page names (fewer levels or policies, the same seeds), and
compares every figure with the page's table, to the last digit that is printed there. Exit status:
0, or 1 when a figure differs. Checks that need recorded traces are skipped, with a note, where
PIGOU_SHARED does not have them.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.shared_folder import shared_folder

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
#: The page of further tables, seen from `RESULTS`.
NOTES = "../notes/further-results.md"
MOONCAKE = Path("traces") / "mooncake" / "conversation_trace.jsonl.zst"
VLLM_PROFILES = Path("profiles")
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


class Figure(NamedTuple):
    """Values that one cell of a table must show."""

    row: tuple[str, ...]  # the first cells of the row, without markup
    column: int  # place of the cell in the row, from 0
    values: tuple[float, ...]  # the numbers of the cell, in order, in the page's units


class Check(NamedTuple):
    """A table of a page, and how some of its figures are made."""

    name: str  # name on the command line
    page: str  # file below docs/results
    header: str  # beginning of the table's first line
    # runs the command in a folder, and returns what it printed.
    measure: Callable[[Path], list[Figure]]
    needs: Path | None = None  # file or folder below PIGOU_SHARED, or None


def table(text: str, header: str) -> list[list[str]]:
    """Return the cells of the table whose first line begins with `header`, without its head.

    Markup is taken off; an empty first cell takes that of the row above.

    Raises:
        LookupError: no table begins so.
    """
    lines = iter(text.splitlines())
    if not any(line.startswith(header) for line in lines):
        raise LookupError(f"no table begins with {header!r}")
    rows: list[list[str]] = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [re.sub(r"[*`]", "", cell).strip() for cell in line.strip().strip("|").split("|")]
        if not set(line) <= set("|-: "):
            cells[0] = cells[0] or (rows[-1][0] if rows else "")
            rows.append(cells)
    return rows


def numbers(cell: str) -> list[tuple[float, int]]:
    """Return the numbers of a cell, each with its decimals."""
    found = [match.replace(",", "") for match in NUMBER.findall(cell.replace(", ", " ; "))]
    return [(float(text), len(text.partition(".")[2])) for text in found]


def differs(cell: str, values: Sequence[float]) -> bool:
    """Whether a cell does not show these values, rounded to its own digits."""
    shown = numbers(cell)
    return len(shown) != len(values) or any(
        abs(value - number) > 0.5 * 10.0**-decimals * (1 + 1e-9)
        for value, (number, decimals) in zip(values, shown, strict=True)
    )


def compare(text: str, header: str, figures: Sequence[Figure]) -> Iterator[str]:
    """Yield one line for each figure that a page shows otherwise, or does not show."""
    rows = table(text, header)
    for figure in figures:
        same = [row for row in rows if tuple(row[: len(figure.row)]) == figure.row]
        if len(same) != 1:
            yield f"{' | '.join(figure.row)}: {len(same)} rows of that name"
        elif differs(same[0][figure.column], figure.values):
            computed = ", ".join(f"{value:.6g}" for value in figure.values)
            yield f"{' | '.join(figure.row)}: {same[0][figure.column]!r}, computed {computed}"


def run(*words: str) -> str:
    """Run a module of this checkout, and return what it printed.

    Raises:
        RuntimeError: it failed; with its last words.
    """
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"python -m {' '.join(words)}: {done.stderr.strip()[-400:]}")
    return done.stdout


def _experiment(out: Path, *words: str) -> list[dict[str, Any]]:
    run("pigou", "experiment", *words, "--no-report", "--out", str(out))
    rows: list[dict[str, Any]] = json.loads((out / "results.json").read_text())["rows"]
    return rows


def table4(out: Path) -> list[Figure]:
    """Table 4 of the paper at low concurrency, five seeds."""
    return [
        Figure((str(row["concurrency"]),), column, (value,))
        for row in _experiment(out, "table4", "--levels", "1,2,4,8,16")
        for column, value in (
            (1, row["ttft_p99_s"]),
            (3, row["poa_legacy"]),
            (5, row["rps"]),
            (7, row["itl_p99_s"] * 1e3),
        )
    ]


def fair(out: Path) -> list[Figure]:
    """The same fleet with a client without a limit."""
    words = ("table4", "--reading", "fair", "--runs", "1", "--levels", "1,32,96,128")
    return [
        Figure((str(row["concurrency"]),), column, (row[key],))
        for row in _experiment(out, *words)
        for column, key in ((1, "ttft_p99_s"), (2, "rps"))
    ]


def peer_reads(out: Path) -> list[Figure]:
    """Reads from other workers' caches, simulated with three policies."""
    figures = []
    for policy in ("toll", "dynamo", "least-loaded"):
        documents = []
        for switch in ("--no-peer-reads", "--peer-reads"):
            file = out / f"{policy}{switch}.json"
            run(
                "pigou", "simulate", "--fleet", "4xboth", "--model", "llama-3.1-8b",
                "--workload", "poisson:rate=20,in=6000,out=128,templates=40,n=800",
                "--gpu", "H200", "--engine", "pigou", "--policy", policy, switch,
                "--json", str(file),
            )  # fmt: skip
            documents.append(json.loads(file.read_text()))
        without, reads = documents
        values = (
            without["ttft_s"]["mean"] * 1e3, reads["ttft_s"]["mean"] * 1e3,
            without["ttft_s"]["p99"] * 1e3, reads["ttft_s"]["p99"] * 1e3,
            reads["peer_reads"]["count"], without["prefix_hit_ratio"], reads["prefix_hit_ratio"],
        )  # fmt: skip
        figures += [Figure((policy,), i, (value,)) for i, value in enumerate(values, 1)]
    return figures


def games(_out: Path) -> list[Figure]:
    """Greedy choice over the optimum in 3,000 random routing games."""
    figures = []
    for line in run("benchmarks.control.routing_games").splitlines():
        match = re.match(r"\s*(equal|unequal)\s+(plain|with tolls)\s+\d+\s+(.*)", line)
        if match:
            values = [float(value.rstrip("%")) for value in match[3].split()]
            row = (match[1], match[2])
            figures += [Figure(row, column, (value,)) for column, value in enumerate(values, 2)]
    return figures


def pools(out: Path) -> list[Figure]:
    """Pools of KV blocks that shrink, in a closed loop."""
    file = out / "pools.json"
    run("benchmarks.control.rho", "--only", "closed", "--json", str(file))
    figures = []
    for row in json.loads(file.read_text())["closed"]:
        if row["blocks"] in (3_000, 2_000, 1_500, 1_000, 200):
            key = ("closed", f"{row['blocks']:,}")
            figures += [
                Figure(key, 2, (row["rho_mean"], row["rho_most"])),
                Figure(key, 5, (row["hits"] * 100,)),
                Figure(key, 7, (row["poa"],)),
                Figure(key, 9, (row["met"],)),
            ]
    return figures


def tiers(out: Path) -> list[Figure]:
    """Tier eviction policies on Mooncake's conversations."""
    file = out / "tiers.json"
    run(
        "benchmarks.kv.tiers", "--mooncake", str(shared_folder() / MOONCAKE),
        "--policies", "price,lru,kvbm", "--json", str(file),
    )  # fmt: skip
    (rows,) = json.loads(file.read_text()).values()
    return [
        Figure((policy,), column, (cell["hit"], cell["saved_s"]))
        for policy, cells in rows.items()
        for column, cell in enumerate(cells, 1)
    ]


def policies(_out: Path) -> list[Figure]:
    """The toll policy on three workloads of the table, ten seeds."""
    from benchmarks.routing import policy_table, policy_workloads
    from pigou.engine.startup_profiling import warm_up
    from pigou_lab.experiments.prices import Contender

    warm_up()
    workloads = {each.name: each for each in policy_workloads.scenarios()}
    figures = []
    for name in ("340b-1p2d serial-prefill C=64", "poisson middle 4xboth", "poisson middle 1p+2d"):
        cells = [
            policy_table.run(workloads[name], Path(), Contender("toll", "toll"), seed)
            for seed in range(1, 11)
        ]
        keys = ("attainment", "rps", "ttft_p99_s", "e2e_mean_s")
        figures += [
            Figure((name,), column, (statistics.fmean(cell[key] for cell in cells),))
            for column, key in enumerate(keys, 1)
        ]
    return figures


def accuracy(_out: Path) -> list[Figure]:
    """A log of vLLM, replayed."""
    figures = []
    for line in run("benchmarks.sim.accuracy").splitlines():
        match = re.match(r"((?:TTFT|TPOT|end to end) (?:mean|P95))\s+([\d.]+)\s+([\d.]+)", line)
        if match:
            figures += [Figure((match[1],), i, (float(match[i + 1]),)) for i in (1, 2)]
    return figures


CHECKS = (
    Check("table4", NOTES, "| C | TTFT P99 s | paper | index", table4),
    Check("fair", NOTES, "| C | fair: TTFT P99 s", fair),
    Check("peer-reads", NOTES, "| policy | TTFT mean without", peer_reads),
    Check("games", NOTES, "| overlaps | greedy", games),
    Check("pools", NOTES, "| loop | blocks | rho mean", pools),
    Check("tiers", NOTES, "| policy | 0.5% | 2% | 5% | 15%", tiers, MOONCAKE),
    Check("policies", NOTES, "| workload | toll: attained | rps", policies),
    Check("accuracy", "simulator.md", "| ms | vLLM | simulated", accuracy, VLLM_PROFILES),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="*", help="names of checks, with * and ?")
    parser.add_argument("--list", action="store_true", help="name the checks, and run none")
    options = parser.parse_args(arguments)
    chosen = [check for check in CHECKS if fnmatch.fnmatch(check.name, options.only)]
    if not chosen:
        parser.error(
            f"--only is {options.only!r}; it may name: {', '.join(c.name for c in CHECKS)}"
        )
    failed = 0
    for check in chosen:
        title = f"{check.name} ({check.page})"
        if options.list:
            print(f"{title}: {check.measure.__doc__}")
        elif check.needs and not (shared_folder() / check.needs).exists():
            print(f"{title}: skipped, {shared_folder() / check.needs} is not there")
        else:
            failed += _checked(check, title)
    return 1 if failed else 0


def _checked(check: Check, title: str) -> int:
    """Run one check and print what it found; return how many figures differ."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        figures = check.measure(Path(folder))
    wrong = list(compare((RESULTS / check.page).read_text(), check.header, figures))
    if not figures:
        wrong = ["the command printed no figure"]
    for line in wrong:
        print(f"{title}: {line}")
    took_s = time.perf_counter() - began
    right = len(figures) - len(wrong)
    print(f"{title}: {right} of {len(figures)} figures as on the page, {took_s:.0f} s")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
