"""Pages: sections of figures and tables, as one HTML file that fetches nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from pigou import __version__
from pigou.report.figure import COLOURS, Figure
from pigou.report.figure_plotly import drawing
from pigou.report.run_record import RunRecord
from pigou.report.table import Cell, ReportTable, numbers
from pigou.report.verdict import PageVerdict
from pigou.small_file import read_bytes

#: Bytes of a page or a record that is read.
_MAX_PAGE = 1 << 30


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure at the top of a page."""

    label: str
    cell: Cell
    more: str = ""  # a second line, "" for none


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page."""

    id: str  # unique on its page
    title: str
    items: tuple[Figure | ReportTable, ...]  # figures and tables, from top to bottom
    note: str = ""  # under the heading


@dataclass(frozen=True, slots=True)
class Page:
    """A page."""

    title: str  # heading, and title of the window
    subtitle: str
    sections: tuple[Section, ...]
    tiles: tuple[Tile, ...] = ()
    notices: tuple[str, ...] = field(default=())  # warnings, such as that nothing was served
    verdict: PageVerdict | None = None  # shown above all else; None where there is none

    @property
    def figures(self) -> list[Figure]:
        """All figures, from top to bottom."""
        return [
            item
            for section in self.sections
            for item in section.items
            if not isinstance(item, ReportTable)
        ]


def html(page: Page) -> str:
    """Return a page as a file: styles, scripts, Plotly and data are all in it."""
    text = _template().render(
        page=page,
        is_table=lambda item: isinstance(item, ReportTable),
        compact=lambda table: table.compact(),
        numbers=numbers,
        style=Markup(_style()),
        data=Markup(_data(page.figures)),
        plotly=Markup(get_plotlyjs()),
        script=Markup(_text("page.js")),
    )
    return f"{text}\n"


def _data(figures: Sequence[Figure]) -> str:
    """Return figures and colours as JSON that may stand in a script element."""
    drawings = [drawing(figure) for figure in figures if not figure.empty]
    text = json.dumps(
        {"figures": drawings, "colours": COLOURS}, separators=(",", ":"), allow_nan=False
    )
    return text.replace("</", "<\\/")


def _style() -> str:
    """Return the styles; the colours are those of the figures."""
    light, dark = (
        ";".join(f"--{name}:{value}" for name, value in COLOURS[theme].items())
        for theme in ("light", "dark")
    )
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n{_text('page.css')}"
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_text("page.html"))


def _text(name: str) -> str:
    return files("pigou.report").joinpath(name).read_text(encoding="utf-8")


PAGE, DATA = "index.html", "report.json"


class ReportError(Exception):
    """A report cannot be made, or read; the message says why, and what to do."""


def prepare(folder: str | Path, option: str = "--report") -> Path:
    """Make the folder of a report, before there is anything to put there.

    Raises:
        ReportError: it cannot be made, or is a file.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(
            f"{option} is {str(folder)!r}, which cannot be made a folder: {error}; name another"
        ) from error
    return path


def write(
    page: Page, folder: Path, data: Any = None, on_file: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Write a page, a picture of each of its figures, and `data` as `report.json`.

    Pictures of the page that was there before are removed.

    Args:
        data: what the page shows; None writes none.
        on_file: called with the name of a file before it is made.

    Raises:
        ReportError: a file cannot be written.
    """
    from pigou.report.figure_png import png  # matplotlib takes half a second to import

    written = [folder / PAGE]
    try:
        _clear(folder)
        on_file(PAGE)
        written[0].write_text(html(page), encoding="utf-8")
        if data is not None:
            written.append(folder / DATA)
            written[-1].write_bytes(msgspec.json.encode(data) + b"\n")
        for figure in page.figures:
            if not figure.empty:
                written.append(folder / f"{figure.id}.png")
                on_file(written[-1].name)
                png(figure, written[-1])
    except OSError as error:
        raise ReportError(f"the report cannot be written: {error}") from error
    return written


def _clear(folder: Path) -> None:
    """Remove the pictures whose figures an earlier page in the folder has, and no others."""
    page = folder / PAGE
    if not page.is_file():
        return
    before = read_bytes(page, _MAX_PAGE).decode("utf-8", "replace")
    for picture in folder.glob("*.png"):
        if f'id="{picture.stem}"' in before:
            picture.unlink()


def load(name: str) -> Any:
    """Read a report or a JSON file: a run's record, its figures, or levels' rows.

    Raises:
        ReportError: there is no such thing, or it is not JSON.
    """
    path = Path(name)
    if path.is_dir():
        paths = [path / file for file in (DATA, "results.json") if (path / file).is_file()]
        if not paths:
            raise ReportError(
                f"{name} has neither report.json nor results.json; name a folder that "
                "`pigou simulate --report` or `pigou experiment --out` wrote"
            )
        path = paths[0]
    try:
        return msgspec.json.decode(read_bytes(path, _MAX_PAGE))
    except OSError as error:
        raise ReportError(f"{name} cannot be read: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"{path} is not JSON: {error}; name what pigou wrote") from error


def as_record(name: str, document: Any) -> RunRecord:
    """Return a run from what `load` read.

    Raises:
        ReportError: it is no run.
    """
    if isinstance(document, dict) and document.get("kind") == "pigou simulation":
        try:
            return msgspec.convert(document, RunRecord)
        except msgspec.ValidationError as error:
            by = document.get("pigou")
            raise ReportError(
                f"{name} is damaged, or of another version: it was written by Pigou {by}, and is "
                f"read by {__version__}: {error}; make it again"
            ) from error
    if (
        isinstance(document, dict)
        and isinstance(document.get("ttft_s"), dict)
        and "offered" in document
    ):
        return RunRecord(
            pigou="", title=Path(name).stem, config={}, figures=document, outcomes=[], curves={},
            attainment=None, stages=[], load=[], course=None, samples=None,
        )  # fmt: skip
    raise ReportError(
        f"{name} is neither a report nor figures of `pigou simulate --json`; name one of these"
    )
