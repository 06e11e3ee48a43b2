"""`pigou experiment`."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pigou.cli.config_options import in_flags
from pigou.cli.option_values import check_json
from pigou.cli.progress import WorkProgress
from pigou.config import ConfigError

if TYPE_CHECKING:
    from pigou_lab.experiments.fleets import PaperFleet, Reading
    from pigou_lab.experiments.registry import Experiment
    from pigou_lab.experiments.results import Row

_ALL = "all"
_UNITS = {"ttft_p99_s": "TTFT P99 s", "itl_p99_s": "ITL P99 s", "poa_legacy": "PoA^",
          "rps": "rps"}  # fmt: skip


def experiment(
    name: Annotated[
        str,
        typer.Argument(
            help="table4, regimes, adaptive, pareto-below, pareto-at, knee, saturated, "
            "overlap-weights, counterfactual, mechanisms, toll, planner, oscillation, "
            "three-games, alerts, gateways, learners, costs, racks, tiers, "
            "tenants, or all."
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
        int, typer.Option(help="Seeds per row; 0 uses the experiment's own number.")
    ] = 0,
    levels: Annotated[
        str,
        typer.Option(
            help="Levels of concurrency, as 96,128; by default all. For planner and three-games "
            "per cent of load, for oscillation seconds of lag, for gateways milliseconds of "
            "lag, for learners capacity in per cent of the load, for costs claims, for racks ms "
            "of ITL, for alerts failure modes, for tenants attacks."
        ),
    ] = "",
    seed: Annotated[int, typer.Option(help="First seed.")] = 1,
    requests: Annotated[
        str,
        typer.Option(help="File to write each request of all runs to, as JSON lines."),
    ] = "",
    report: Annotated[
        bool, typer.Option(help="Draw the results' page, index.html, beside them.")
    ] = True,
) -> None:
    """Run an experiment of "The Price of Anarchy in Disaggregated Inference" again."""
    from pigou.engine.startup_profiling import warm_up
    from pigou_lab.experiments.fleets import fleet
    from pigou_lab.experiments.registry import EXPERIMENTS
    from pigou_lab.experiments.results import prepared, requests_to, write

    try:
        if runs < 0 or seed < 0:
            raise ConfigError(f"--runs is {runs} and --seed {seed}; both must be at least 0")
        paper_fleet, how = fleet(fleet_name), _reading(reading)
        names = list(EXPERIMENTS) if name == _ALL else [name]
        plan = [(chosen, _levels(chosen, levels, name)) for chosen in names]
        if reading and name != _ALL and not EXPERIMENTS[name].reads:
            raise ConfigError(f"--reading is {reading!r}; {name} tries all of them: leave it out")
        check_json(requests, "--requests")
        folder = prepared(Path(out))
        warm_up()
        documents = []
        with requests_to(requests):
            for chosen, users in plan:
                one = EXPERIMENTS[chosen]
                seeds = range(seed, seed + (runs or one.runs))
                documents.append(_run(chosen, one, paper_fleet, how, seeds, users))
                write(folder / chosen if name == _ALL else folder, documents[-1])
                _show(one, documents[-1])
        if name == _ALL:
            write(folder, _together(documents))
        if report:
            _draw(folder, _together(documents) if name == _ALL else documents[0])
    except (ConfigError, ValueError) as error:
        message = in_flags(str(error), {"fleet": "--fleet"})
        typer.echo(f"pigou experiment: {message}", err=True)
        raise typer.Exit(2) from None


def _reading(text: str) -> Reading:
    from pigou_lab.experiments.fleets import READINGS

    if not text:
        return "client-pool"
    for known in READINGS:
        if text == known:
            return known
    raise ConfigError(f"--reading is {text!r}; it must be one of: {', '.join(READINGS)}")


def _levels(name: str, text: str, experiment_name: str) -> Sequence[int]:
    from pigou_lab.experiments.registry import EXPERIMENTS

    one = EXPERIMENTS.get(name)
    if one is None:
        known = ", ".join([*EXPERIMENTS, _ALL])
        raise ConfigError(f"there is no experiment {name!r}; it must be one of: {known}")
    if not text:
        return one.levels
    if one.fixed or experiment_name == _ALL:
        raise ConfigError(f"--levels is {text!r}; {experiment_name} has its own: leave it out")
    try:
        users = [int(level) for level in text.split(",")]
    except ValueError:
        users = []
    if not users or min(users) < 1:
        raise ConfigError(f"--levels is {text!r}; write numbers from 1, as in 96,128")
    return users


def _run(
    name: str, one: Experiment, paper_fleet: PaperFleet, reading: Reading, seeds: Sequence[int],
    users: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    from pigou_lab.experiments.results import document, log_experiment

    log_experiment(name)
    rows: list[Row] = []
    with WorkProgress() as progress:
        task = progress.add_task(name, total=None)
        for row in one.rows(paper_fleet, reading, seeds, users):
            rows.append(row)
            progress.update(task, description=f"{name}: {len(rows)} rows")
            gc.collect()  # a run's calls and fleet refer to one another
    return document(
        name, paper_fleet, reading, seeds, rows, one.summary(rows, paper_fleet, reading)
    )


def _together(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = {key: documents[0][key] for key in ("fleet", "reading", "constants")}
    return {
        "experiment": _ALL,
        **first,
        "seeds": {document["experiment"]: document["seeds"] for document in documents},
        "summary": {document["experiment"]: document["summary"] for document in documents},
        "rows": [row for document in documents for row in document["rows"]],
    }


def _show(one: Experiment, document: Mapping[str, Any]) -> None:
    from pigou_lab.experiments.results import COMPARED

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=220)
    reads = document["reading"] if one.reads else "each its own"
    console.print(f"{one.about}: fleet {document['fleet']}, reading {reads}, "
                  f"{len(document['seeds'])} runs a row; ± 95% (Student's t)")  # fmt: skip
    headings = ["C", *one.columns]
    for key in COMPARED:
        headings += [_UNITS[key], "paper", "error"]
    rows = []
    for row in document["rows"]:
        cells = [str(row["concurrency"]), *(_measured(row, column) for column in one.columns)]
        for key in COMPARED:
            paper = row.get("paper", {}).get(key)
            error = row.get("relative_error", {}).get(key)
            cells += [_measured(row, key), _text(paper), "-" if error is None else f"{error:+.1%}"]
        rows.append(cells)
    filled = [index for index in range(len(headings)) if any(row[index] != "-" for row in rows)]
    table = Table()
    for index in filled:
        left = index <= len(one.columns)
        table.add_column(headings[index], justify="left" if left else "right")
    for cells in rows:
        table.add_row(*(cells[index] for index in filled))
    console.print(table)
    for key, value in document["summary"].items():
        console.print(f"{key}: {_text(value)}")
    console.print()


def _measured(row: Mapping[str, Any], key: str) -> str:
    """Return a figure, and the half width of its 95% interval over the seeds where known."""
    interval = row.get("ci95", {}).get(key)
    text = _text(row.get(key))
    return text if interval is None else f"{text} ± {_text((interval[1] - interval[0]) / 2)}"


def _draw(folder: Path, document: Mapping[str, Any]) -> None:
    """Write the page of results beside them; log what cannot be drawn."""
    from pigou.cli.report import publish
    from pigou_lab.experiments.page import experiment_page

    try:
        publish(experiment_page(folder.name, document), folder)
    except ValueError as error:
        typer.echo(f"pigou experiment: no page was drawn: {error}", err=True)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "; ".join(_text(item) for item in value)
    return str(value)
