"""`pigou experiment`."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pigou.cli.config_options import in_flags
from pigou.config import ConfigError

if TYPE_CHECKING:
    from pigou.experiments.fleets import PaperFleet, Reading
    from pigou.experiments.registry import Experiment
    from pigou.experiments.results import Row

_ALL = "all"
_UNITS = {"ttft_p99_s": "TTFT P99 s", "itl_p99_s": "ITL P99 s", "poa_legacy": "PoA^",
          "rps": "rps"}  # fmt: skip


def experiment(
    name: Annotated[
        str,
        typer.Argument(
            help="table4, regimes, adaptive, pareto-below, pareto-at, knee, saturated, "
            "overlap-weights, counterfactual, mechanisms, toll, or all."
        ),
    ],
    out: Annotated[str, typer.Option(help="Folder to write results.json to.")],
    reading: Annotated[
        str,
        typer.Option(
            help="serial-prefill, client-pool or fair; client-pool unless given. "
            "See docs/results/replication.md."
        ),
    ] = "",
    fleet_name: Annotated[
        str, typer.Option("--fleet", help="340b-1p2d, 70b-1p2d or 70b-1p5d.")
    ] = "340b-1p2d",
    runs: Annotated[
        int, typer.Option(help="Seeds of each row; 0 takes the experiment's own number.")
    ] = 0,
    levels: Annotated[
        str, typer.Option(help="Levels of concurrency, as in 96,128; all unless given.")
    ] = "",
    seed: Annotated[int, typer.Option(help="The first of the seeds.")] = 1,
    report: Annotated[
        bool, typer.Option(help="Draw the page of the results, index.html beside them.")
    ] = True,
) -> None:
    """Run an experiment of "The Price of Anarchy in Disaggregated Inference" again."""
    from pigou.engine.startup_profiling import warm_up
    from pigou.experiments.fleets import fleet
    from pigou.experiments.registry import EXPERIMENTS
    from pigou.experiments.results import prepared, write

    try:
        if runs < 0 or seed < 0:
            raise ConfigError(f"--runs is {runs} and --seed {seed}; both must be at least 0")
        which, how = fleet(fleet_name), _reading(reading)
        names = list(EXPERIMENTS) if name == _ALL else [name]
        plan = [(each, _levels(each, levels, name)) for each in names]
        if reading and name != _ALL and not EXPERIMENTS[name].reads:
            raise ConfigError(f"--reading is {reading!r}; {name} tries all of them: leave it out")
        folder = prepared(Path(out))
        warm_up()
        found = []
        for each, users in plan:
            one = EXPERIMENTS[each]
            seeds = range(seed, seed + (runs or one.runs))
            found.append(_run(each, one, which, how, seeds, users))
            write(folder / each if name == _ALL else folder, found[-1])
            _show(one, found[-1])
        if name == _ALL:
            write(folder, _together(found))
        if report:
            _draw(folder, _together(found) if name == _ALL else found[0])
    except (ConfigError, ValueError) as error:
        told = in_flags(str(error), {"fleet": "--fleet"})
        typer.echo(f"pigou experiment: {told}", err=True)
        raise typer.Exit(2) from None


def _reading(text: str) -> Reading:
    from pigou.experiments.fleets import READINGS

    if not text:
        return "client-pool"
    for each in READINGS:
        if text == each:
            return each
    raise ConfigError(f"--reading is {text!r}; it must be one of: {', '.join(READINGS)}")


def _levels(name: str, text: str, asked: str) -> Sequence[int]:
    from pigou.experiments.registry import EXPERIMENTS

    one = EXPERIMENTS.get(name)
    if one is None:
        known = ", ".join([*EXPERIMENTS, _ALL])
        raise ConfigError(f"there is no experiment {name!r}; it must be one of: {known}")
    if not text:
        return one.levels
    if one.fixed or asked == _ALL:
        raise ConfigError(f"--levels is {text!r}; {asked} has its own: leave it out")
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"--levels is {text!r}; write numbers from 1, as in 96,128")
    return found


def _run(
    name: str, one: Experiment, which: PaperFleet, reading: Reading, seeds: Sequence[int],
    users: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """Run an experiment, and show how far it is."""
    from pigou.experiments.results import document

    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    rows: list[Row] = []
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True,
        refresh_per_second=2,
    ) as progress:  # fmt: skip
        task = progress.add_task(name, total=None)
        for row in one.rows(which, reading, seeds, users):
            rows.append(row)
            progress.update(task, description=f"{name}: {len(rows)} rows")
            gc.collect()  # a run's calls and fleet refer to one another
    return document(name, which, reading, seeds, rows, one.summary(rows, which, reading))


def _together(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one document of all: rows say which experiment they are of."""
    first = {key: found[0][key] for key in ("fleet", "reading", "constants")}
    return {
        "experiment": _ALL,
        **first,
        "seeds": {each["experiment"]: each["seeds"] for each in found},
        "summary": {each["experiment"]: each["summary"] for each in found},
        "rows": [row for each in found for row in each["rows"]],
    }


def _show(one: Experiment, found: Mapping[str, Any]) -> None:
    from pigou.experiments.results import COMPARED

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    reads = found["reading"] if one.reads else "each its own"
    console.print(f"{one.about}: fleet {found['fleet']}, reading {reads}, "
                  f"{len(found['seeds'])} runs a row")  # fmt: skip
    headings = ["C", *one.columns]
    for key in COMPARED:
        headings += [_UNITS[key], "paper", "error"]
    rows = []
    for row in found["rows"]:
        cells = [str(row["concurrency"]), *(_text(row.get(each)) for each in one.columns)]
        for key in COMPARED:
            paper = row.get("paper", {}).get(key)
            error = row.get("relative_error", {}).get(key)
            cells += [_text(row[key]), _text(paper), "-" if error is None else f"{error:+.1%}"]
        rows.append(cells)
    filled = [place for place in range(len(headings)) if any(row[place] != "-" for row in rows)]
    table = Table()
    for place in filled:
        left = place <= len(one.columns)
        table.add_column(headings[place], justify="left" if left else "right")
    for cells in rows:
        table.add_row(*(cells[place] for place in filled))
    console.print(table)
    for key, value in found["summary"].items():
        console.print(f"{key}: {_text(value)}")
    console.print()


def _draw(folder: Path, found: Mapping[str, Any]) -> None:
    """Write the page of results beside them; what cannot be drawn is said, and no error."""
    from pigou.cli.report import experiment_page, publish
    from pigou.report.page import ReportError

    try:
        publish(experiment_page(folder.name, found), folder)
    except (ReportError, ValueError) as error:
        typer.echo(f"pigou experiment: no page was drawn: {error}", err=True)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "; ".join(_text(each) for each in value)
    return str(value)
