"""The numbers of a figure as a table."""

from __future__ import annotations

from collections.abc import Sequence

from pigou.report.figure import Axis, Bars, Chart, Figure, Heat
from pigou.report.table import Cell, Form, Table

#: Most rows; of longer lines, points at even distances are shown.
ROWS = 40


def numbers(figure: Figure) -> Table:
    """Return what a figure shows, folded away; long ones are thinned out, and say so."""
    if isinstance(figure, Bars):
        columns = ("", *(name for name, _ in figure.parts))
        rows = tuple(
            (Cell(name), *(Cell(values[k], _form(figure.x)) for _, values in figure.parts))
            for k, name in enumerate(figure.rows)
        )
        return _table(figure, columns, rows, "")
    return _of_chart(figure) if isinstance(figure, Chart) else _of_heat(figure)


def _of_chart(chart: Chart) -> Table:
    lines = chart.lines
    shared = all(list(line.x) == list(lines[0].x) for line in lines)
    if shared and lines:
        kept = _kept(len(lines[0].x))
        rows = tuple(
            (_cell(lines[0].x[k], chart.x), *(_cell(line.y[k], chart.y) for line in lines))
            for k in kept
        )
        columns = (chart.x.title, *(line.name for line in lines))
        return _table(chart, columns, rows, _thinned(len(lines[0].x)))
    rows = tuple(
        (Cell(line.name), _cell(line.x[k], chart.x), _cell(line.y[k], chart.y))
        for line in lines
        for k in _kept(len(line.x), max(4, ROWS // len(lines)))
    )
    total = sum(len(line.x) for line in lines)
    return _table(
        chart, ("", chart.x.title, chart.y.title), rows, "" if len(rows) == total else _EVEN
    )


def _of_heat(heat: Heat) -> Table:
    rows = []
    for name, values in zip(heat.rows, heat.z, strict=True):
        there = [value for value in values if value is not None]
        figures = (min(there), sum(there) / len(there), max(there)) if there else (None,) * 3
        rows.append((Cell(name), *(Cell(value, _form(heat.unit)) for value in figures)))
    note = "Over the samples; all of them are in report.json."
    return _table(heat, ("", "least", "mean", "most"), tuple(rows), note)


_EVEN = "Points at even distances; all of them are in report.json."


def _thinned(count: int) -> str:
    return _EVEN if count > ROWS else ""


def _kept(count: int, most: int = ROWS) -> Sequence[int]:
    """Return the places of the points to show: the first, the last, and even ones between."""
    if count <= most:
        return range(count)
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})


def _cell(value: float | None, axis: Axis) -> Cell:
    for place, label in axis.ticks:
        if value == place:
            return Cell(label)
    return Cell(value, _form(axis))


def _form(axis: Axis) -> Form:
    return axis.unit


def _table(
    figure: Figure, columns: tuple[str, ...], rows: tuple[tuple[Cell, ...], ...], note: str
) -> Table:
    return Table(f"{figure.id}-numbers", f"Numbers: {figure.title}", columns, rows, note, True)
