"""Tables: figures under headings, each as text to read and as the exact value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pigou.report.figure import Axis, Bars, Chart, Figure, Heat, duration, significant

Value = str | int | float | None
#: How a column's numbers read: plain, seconds in a fitting unit, percent, a factor, or a
#: difference in percent.
Form = Literal["", "seconds", "share", "ratio", "signed"]
_FORMS: dict[Form, Callable[[float], str]] = {
    "seconds": lambda value: duration(value, keep=True),
    "share": lambda value: f"{value:.1%}",
    "ratio": lambda value: f"{significant(value, 3, keep=True)} ×",
    "signed": lambda value: f"{value:+.1%}",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One value."""

    value: Value  # exact; None where there is none
    form: Form = ""
    tint: float | None = None  # 0 to 1, how much it is coloured; None for not at all

    @property
    def number(self) -> bool:
        """Whether it is a figure."""
        return isinstance(self.value, int | float)

    @property
    def filled(self) -> bool:
        """Whether it has a value: a finite figure, or a text."""
        if isinstance(self.value, str):
            return self.value not in ("", "–")
        return self.value is not None and math.isfinite(self.value)

    @property
    def text(self) -> str:
        """How it reads."""
        value = self.value
        if isinstance(value, str):
            return value
        if value is None or not math.isfinite(value):
            return "–"
        if self.form:
            return _FORMS[self.form](value)
        return f"{value:,}" if isinstance(value, int) else significant(value, keep=True)

    @property
    def exact(self) -> str:
        """The value, to the last digit."""
        return repr(self.value) if self.number else ""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Rows under headings."""

    id: str  # unique on its page
    title: str
    columns: tuple[str, ...]  # headings; the first column names the rows
    rows: tuple[tuple[Cell, ...], ...]  # cells, (rows, columns)
    note: str = ""
    folded: bool = False  # whether it is shown only when asked for

    def compact(self) -> ReportTable:
        """Return the table without columns that no row has a value in; the first one stays."""
        filled = [
            column
            for column in range(len(self.columns))
            if not column or not self.rows or any(cells[column].filled for cells in self.rows)
        ]
        if len(filled) == len(self.columns):
            return self
        return replace(
            self,
            columns=tuple(self.columns[column] for column in filled),
            rows=tuple(tuple(cells[column] for column in filled) for cells in self.rows),
        )

    @property
    def figures(self) -> tuple[bool, ...]:
        """Whether there are figures under a heading, (columns,)."""
        return tuple(
            any(cells[column].number for cells in self.rows) for column in range(len(self.columns))
        )


def row(name: str, values: Sequence[Value], form: Form = "") -> tuple[Cell, ...]:
    """Return a row whose values read alike."""
    return (Cell(name), *(Cell(value, form) for value in values))


#: Most rows; of longer lines, points at even distances are shown.
ROWS = 40


def numbers(figure: Figure) -> ReportTable:
    """Return the numbers of a figure, folded away; long ones are thinned out, with a note."""
    if isinstance(figure, Bars):
        columns = ("", *(name for name, _ in figure.parts))
        rows = tuple(
            (Cell(name), *(Cell(values[k], _form(figure.x)) for _, values in figure.parts))
            for k, name in enumerate(figure.rows)
        )
        return _table(figure, columns, rows, "")
    return _of_chart(figure) if isinstance(figure, Chart) else _of_heat(figure)


def _of_chart(chart: Chart) -> ReportTable:
    lines = chart.lines
    shared = all(list(line.x) == list(lines[0].x) for line in lines)
    if shared and lines:
        points = _shown_points(len(lines[0].x))
        rows = tuple(
            (_cell(lines[0].x[k], chart.x), *(_cell(line.y[k], chart.y) for line in lines))
            for k in points
        )
        columns = (chart.x.title, *(line.name for line in lines))
        return _table(chart, columns, rows, _thinned(len(lines[0].x)))
    rows = tuple(
        (Cell(line.name), _cell(line.x[k], chart.x), _cell(line.y[k], chart.y))
        for line in lines
        for k in _shown_points(len(line.x), max(4, ROWS // len(lines)))
    )
    total = sum(len(line.x) for line in lines)
    return _table(
        chart, ("", chart.x.title, chart.y.title), rows, "" if len(rows) == total else _EVEN
    )


def _of_heat(heat: Heat) -> ReportTable:
    rows = []
    for name, values in zip(heat.rows, heat.z, strict=True):
        known = [value for value in values if value is not None]
        figures = (min(known), sum(known) / len(known), max(known)) if known else (None,) * 3
        rows.append((Cell(name), *(Cell(value, _form(heat.unit)) for value in figures)))
    note = "Over the samples; all of them are in report.json."
    return _table(heat, ("", "least", "mean", "most"), tuple(rows), note)


_EVEN = "Points at even distances; all of them are in report.json."


def _thinned(count: int) -> str:
    return _EVEN if count > ROWS else ""


def _shown_points(count: int, max_points: int = ROWS) -> Sequence[int]:
    """Return indices of the points to show: the first, the last, and even ones between."""
    if count <= max_points:
        return range(count)
    return sorted({round(k * (count - 1) / (max_points - 1)) for k in range(max_points)})


def _cell(value: float | None, axis: Axis) -> Cell:
    for tick, label in axis.ticks:
        if value == tick:
            return Cell(label)
    return Cell(value, _form(axis))


def _form(axis: Axis) -> Form:
    return axis.unit


def _table(
    figure: Figure, columns: tuple[str, ...], rows: tuple[tuple[Cell, ...], ...], note: str
) -> ReportTable:
    return ReportTable(
        f"{figure.id}-numbers", f"Numbers: {figure.title}", columns, rows, note, True
    )
