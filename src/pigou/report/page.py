"""Pages: sections of figures and tables, as one HTML file that fetches nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from pigou.report.figure import Figure
from pigou.report.interactive import drawing
from pigou.report.numbers import numbers
from pigou.report.palette import COLOURS
from pigou.report.table import Cell, Table
from pigou.report.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure that is seen first.

    Attributes:
        label: what it is.
        cell: the figure.
        more: a second line, "" for none.
    """

    label: str
    cell: Cell
    more: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page.

    Attributes:
        id: unique on its page.
        title: heading.
        items: figures and tables, from top to bottom.
        note: under the heading.
    """

    id: str
    title: str
    items: tuple[Figure | Table, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        title: heading, and title of the window.
        subtitle: under it.
        sections: from top to bottom.
        tiles: before them.
        notices: what a reader must know first, such as that nothing was served.
        verdict: shown above all else; None where there is none.
    """

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    tiles: tuple[Tile, ...] = ()
    notices: tuple[str, ...] = field(default=())
    verdict: Verdict | None = None

    @property
    def figures(self) -> list[Figure]:
        """All figures, from top to bottom."""
        return [
            each for part in self.sections for each in part.items if not isinstance(each, Table)
        ]


def html(page: Page) -> str:
    """Return a page as a file: styles, scripts, Plotly and data are all in it."""
    found = _template().render(
        page=page,
        is_table=lambda item: isinstance(item, Table),
        compact=lambda table: table.compact(),
        numbers=numbers,
        style=Markup(_style()),
        data=Markup(_data(page.figures)),
        plotly=Markup(get_plotlyjs()),
        script=Markup(_text("page.js")),
    )
    return f"{found}\n"


def _data(figures: Sequence[Figure]) -> str:
    """Return figures and colours as JSON that may stand in a script element."""
    drawings = [drawing(each) for each in figures if not each.empty]
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
