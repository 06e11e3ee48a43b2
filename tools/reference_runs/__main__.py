"""Record and compare reference runs; see CONTRIBUTING.md, "Before and after a refactoring".

python -m tools.reference_runs list
python -m tools.reference_runs compare [--only PATTERN] [--jobs N]
python -m tools.reference_runs record [--only PATTERN] [--jobs N] [--live]
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from . import store
from .difference import ABSENT, MAX_SHOWN, differences
from .journals import JOURNALED, record_journal, replay_journal
from .simulate import simulate_all
from .simulations import SIMULATIONS
from .texts import SERVERS, greedy_texts


class Run(NamedTuple):
    """A reference run: its kind and name, what it covers, and whether it takes a live fleet."""

    name: str
    covers: str
    live: bool = False


def runs(pattern: str = "*") -> list[Run]:
    """Return the runs whose names match a pattern, in order."""
    every = [Run(f"simulations/{name}", run.covers) for name, run in SIMULATIONS.items()]
    every += [Run(f"journals/{name}", run.covers, live=True) for name, run in JOURNALED.items()]
    every += [Run(f"texts/{name}", run.covers, live=True) for name, run in SERVERS.items()]
    return [run for run in every if fnmatch.fnmatch(run.name, f"*{pattern.strip('*')}*")]


def results(chosen: Sequence[Run], jobs: int) -> Iterator[tuple[str, Any]]:
    """Run what was chosen, and yield each document as soon as it is there."""
    names = [run.name.partition("/")[2] for run in chosen if run.name.startswith("simulations/")]
    for name, document in simulate_all(names, jobs):
        yield f"simulations/{name}", document
    for run in chosen:
        kind, _, name = run.name.partition("/")
        if kind == "journals":
            yield run.name, replay_journal(name)
        elif kind == "texts":
            yield run.name, greedy_texts(name)


def record(chosen: Sequence[Run], jobs: int, live: bool) -> int:
    """Write the files of runs; those that take a live fleet only when asked to."""
    chosen = [run for run in chosen if live or not run.live]
    for run in chosen:
        kind, _, name = run.name.partition("/")
        if kind == "journals":
            store.JOURNALS.mkdir(parents=True, exist_ok=True)
            (store.JOURNALS / f"{name}.jsonl.gz").write_bytes(record_journal(name))
    for name, document in results(chosen, jobs):
        store.write(store.FOLDER / f"{name}.json", document)
        print(f"recorded {name}", flush=True)
    return 0


def compare(chosen: Sequence[Run], jobs: int, tolerance: float) -> int:
    """Run all again, tell the first differences of each; return 1 where there is any, else 0.

    A field that a run has now, and its record lacks, is told, and is no difference.
    """
    began, different = time.monotonic(), 0
    for name, document in results(chosen, jobs):
        path = store.FOLDER / f"{name}.json"
        if not path.is_file():
            print(f"{name}: there is no {path.relative_to(store.ROOT)}; record it first")
            different += 1
            continue
        found = list(differences(store.read(path), document, tolerance))
        added = [each.path for each in found if each.old == ABSENT]
        found = [each for each in found if each.old != ABSENT]
        different += bool(found)
        print(f"{name}: {f'{len(found)} differences' if found else 'equal'}", flush=True)
        if added:
            print(f"  fields that were not recorded: {', '.join(added[:MAX_SHOWN])}")
        for each in found[:MAX_SHOWN]:
            print(f"  {each.path}\n    old: {each.old}\n    new: {each.new}")
    took = time.monotonic() - began
    print(f"{len(chosen)} runs, {different} of them different, {took:.0f} s")
    return int(different > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference_runs")
    parser.add_argument("command", choices=("record", "compare", "list"))
    parser.add_argument("--only", default="*", metavar="PATTERN", help="runs whose names match")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--live", action="store_true",
                        help="record: journals and texts of live fleets, too")  # fmt: skip
    parser.add_argument("--tolerance", type=float, default=0.0,
                        help="relative error of numbers, for another CPU (default: 0)")  # fmt: skip
    options = parser.parse_args(arguments)
    chosen = runs(options.only)
    if not chosen:
        parser.error(f"--only is {options.only!r}; no run's name matches: see `list`")
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1")
    if options.command == "list":
        for run in chosen:
            print(f"{run.name:44}{run.covers}")
        return 0
    if options.command == "record":
        return record(chosen, options.jobs, options.live)
    return compare(chosen, options.jobs, options.tolerance)


if __name__ == "__main__":
    sys.exit(main())
