"""`pigou report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pigou.config import ConfigError
from pigou.extras import require

if TYPE_CHECKING:
    from pigou.report.page import Page
    from pigou.report.run_record import RunRecord


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
    """Lay runs beside each other, or draw an experiment: one page, and pictures.

    Ratios are to the first run. One run alone gets its own page again.
    """
    try:
        require("report", "a report")
    except ConfigError as error:
        typer.echo(f"pigou report: {error}", err=True)
        raise typer.Exit(2) from None
    from pigou.report.page import ReportError, prepare

    try:
        page = _page(paths)
        publish(page, prepare(out, "--out"))
    except (ReportError, ValueError) as error:
        typer.echo(f"pigou report: {error}", err=True)
        raise typer.Exit(2) from None


def publish(page: Page, folder: Path, data: Any = None) -> None:
    """Write a report, and say where it is; a bar is shown on a terminal.

    Raises:
        ReportError: a file cannot be written.
    """
    from pigou.report.page import write

    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task("", total=1 + sum(not each.empty for each in page.figures))
        written = write(
            page, folder, data, lambda name: progress.update(task, description=name, advance=1)
        )
    typer.echo(f"report: {written[0]}, and {len(written) - 1} files beside it", err=True)


def _page(paths: Sequence[str]) -> Page:
    from pigou.report import comparison_page
    from pigou.report.page import ReportError, as_record, load

    labels, names = zip(*(_labelled(each) for each in paths), strict=True)
    found = [load(name) for name in names]
    rows = [isinstance(each, dict) and isinstance(each.get("rows"), list) for each in found]
    if any(rows):
        if len(found) > 1:
            raise ReportError(
                f"{names[rows.index(True)]} is an experiment; give it alone, or give runs only"
            )
        return experiment_page(names[0], found[0])
    runs = [as_record(name, each) for name, each in zip(names, found, strict=True)]
    if len(runs) == 1:
        return _alone(names[0], runs[0])
    return comparison_page.page(runs, _different(labels, names))


def experiment_page(name: str, found: Mapping[str, Any]) -> Page:
    """Return the page of the document of an experiment; `name` where it does not tell its own.

    Raises:
        ValueError: it has nothing to draw.
    """
    from pigou.report import experiment_page

    title = str(found.get("experiment") or Path(name).stem)
    about = [f"{key} {found[key]}" for key in ("fleet", "reading") if found.get(key)]
    return experiment_page.page(found["rows"], title=title, subtitle=", ".join(about))


def _alone(name: str, found: RunRecord) -> Page:
    from pigou.report import run_page
    from pigou.report.page import ReportError

    if not found.curves:
        raise ReportError(
            f"{name} has figures only; give the folder of `pigou simulate --report`, or two runs "
            "or more"
        )
    return run_page.page(found)


def _labelled(text: str) -> tuple[str, str]:
    """Return the label and the path of an argument."""
    label, equals, path = text.partition("=")
    if equals and label and path and not Path(text).exists():
        return label, path
    found = Path(text)
    return (found.stem if found.suffix == ".json" else found.resolve().name), text


def _different(labels: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return labels; those that are the same become paths, numbered where these are the same."""
    found = [
        name if labels.count(label) > 1 else label
        for label, name in zip(labels, names, strict=True)
    ]
    return [
        f"{each} ({found[:place].count(each) + 1})" if found.count(each) > 1 else each
        for place, each in enumerate(found)
    ]
