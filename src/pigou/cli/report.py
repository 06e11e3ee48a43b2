"""`pigou report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer

from pigou.cli.progress import WorkProgress
from pigou.config import ConfigError, RunError
from pigou.registry import named, require

if TYPE_CHECKING:
    from pigou.report.page import ReportPage
    from pigou.report.run_record import RunRecord
    from pigou.sim.result import SimulationResult
    from pigou.sim.simulation import Simulation


def report(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Folders of `pigou simulate --report` or `pigou experiment --out`, or JSON files "
            "of `--json`. LABEL=PATH names a run."
        ),
    ],
    out: Annotated[str, typer.Option(help="Folder to write the page and its pictures to.")],
) -> None:
    """Compare runs, or draw an experiment: one page with plots.

    Ratios are to the first run. A single run gets its own page again.
    """
    require("report", "a report")
    from pigou.report.page import prepare

    publish(_page(paths), prepare(out, "--out"))


def publish(page: ReportPage, folder: Path, data: Any = None) -> None:
    """Write a report, and say where it is; a bar is shown on a terminal.

    Raises:
        ConfigError: a file cannot be written.
    """
    from pigou.report.page import write

    with WorkProgress() as progress:
        task = progress.add_task("", total=1 + sum(not figure.empty for figure in page.figures))
        written = write(
            page, folder, data, lambda name: progress.update(task, description=name, advance=1)
        )
    typer.echo(f"report: {written[0]}, and {len(written) - 1} files beside it", err=True)


def _page(paths: Sequence[str]) -> ReportPage:
    from pigou.report import comparison_page
    from pigou.report.page import as_record, load

    labels, names = zip(*(_labelled(entry) for entry in paths), strict=True)
    documents = [load(name) for name in names]
    rows = [isinstance(entry, dict) and isinstance(entry.get("rows"), list) for entry in documents]
    if any(rows):
        if len(documents) > 1:
            raise ConfigError(
                f"{names[rows.index(True)]} is an experiment; give it alone, or give runs only"
            )
        draw = named("pigou.report", "experiment", "report")
        return cast("ReportPage", draw(names[0], documents[0]))
    runs = [as_record(name, entry) for name, entry in zip(names, documents, strict=True)]
    if len(runs) == 1:
        return _single_run_page(names[0], runs[0])
    return comparison_page.page(runs, _different(labels, names))


def _single_run_page(name: str, run: RunRecord) -> ReportPage:
    from pigou.report import run_page

    if not run.curves:
        raise ConfigError(
            f"{name} has figures only; give the folder of `pigou simulate --report`, or two runs "
            "or more"
        )
    return run_page.page(run)


def _labelled(text: str) -> tuple[str, str]:
    """Return the label and the path of an argument."""
    label, equals, path = text.partition("=")
    if equals and label and path and not Path(text).exists():
        return label, path
    file = Path(text)
    return (file.stem if file.suffix == ".json" else file.resolve().name), text


def _different(labels: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return labels; those that are the same become paths, numbered where these are the same."""
    keys = [
        name if labels.count(label) > 1 else label
        for label, name in zip(labels, names, strict=True)
    ]
    return [
        f"{entry} ({keys[:index].count(entry) + 1})" if keys.count(entry) > 1 else entry
        for index, entry in enumerate(keys)
    ]


class Reporter:
    """Watches a simulation that has not run yet, and reports on it when it has."""

    def __init__(self, folder: str, simulation: Simulation) -> None:
        from pigou.report.page import prepare
        from pigou.sim.timeline import Timeline

        self._folder: Path = prepare(folder)
        self._timeline = Timeline(simulation)

    def write(
        self, result: SimulationResult, document: Mapping[str, Any], title: str,
        groups: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Write the page, its pictures and its data."""
        from pigou.report.run_page import page
        from pigou.report.run_record import record

        config = {name: _readable(msgspec.to_builtins(group)) for name, group in groups.items()}
        run = record(result, self._timeline, document, title, config)
        try:
            publish(page(run), self._folder, run)
        except ConfigError as error:
            raise RunError(str(error)) from None


def _readable(value: Any) -> Any:
    """Return settings in readable form: infinite values say that they have no limit."""
    from pigou.sim.simulation import UNLIMITED

    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(item) for item in value]
    if value == UNLIMITED:
        return "no limit"
    return "never" if value == float("inf") else value
