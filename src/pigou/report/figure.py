"""Figures: descriptions of charts, which pages (Plotly) and pictures (PNG) both draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Values = Sequence[float | None]
#: Unit of an axis: "seconds" and "share" have ticks of their own.
Unit = Literal["", "seconds", "share"]
Stroke = Literal["solid", "dash", "dot"]
Theme = Literal["light", "dark"]
#: By name: what is drawn on, text, quiet text, grid, lines in the order of their use, and the
#: scale of maps from least to most.
COLOURS: Final[dict[Theme, dict[str, str]]] = {
    "light": {
        "paper": "#ffffff", "ink": "#1c2024", "muted": "#6f767e", "grid": "#e7e9ec",
        "c0": "#2366b8", "c1": "#d9591c", "c2": "#0f8f63", "c3": "#8a5cc2",
        "c4": "#b8860b", "c5": "#c9377f", "c6": "#2a9cb0", "c7": "#5f6b3a",
        "h0": "#f1f5fa", "h1": "#7fb0e6", "h2": "#0c3c78",
    },
    "dark": {
        "paper": "#16191d", "ink": "#e6e8eb", "muted": "#98a0a9", "grid": "#2b3036",
        "c0": "#6aa5f0", "c1": "#f0884f", "c2": "#3fbf8f", "c3": "#b592ea",
        "c4": "#dcb13c", "c5": "#ee74ab", "c6": "#5cc5d8", "c7": "#a8b574",
        "h0": "#1c222a", "h1": "#346fb5", "h2": "#cfe4ff",
    },
}  # fmt: skip
#: Different colours of lines.
LINES: Final = 8
STROKES: Final[tuple[Stroke, ...]] = ("solid", "dash", "dot")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis."""

    title: str
    unit: Unit = ""
    log: bool = False  # whether distances are ratios; values of 0 and less are not drawn then
    ticks: tuple[tuple[float, str], ...] = ()  # (value, label) in place of numbers
    zero: bool = False  # whether it begins at 0


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line; None is a gap."""

    name: str
    x: Values  # values, (points,)
    y: Values  # values, (points,)
    colour: int = 0  # index in the palette; -1 for the muted colour of the paper's figures
    stroke: Stroke = "solid"
    step: bool = False  # whether it stays until the next point
    marks: bool = False  # whether points are shown
    bare: bool = False  # whether there are only points, and no line


@dataclass(frozen=True, slots=True)
class Plot:
    """What every figure has."""

    id: str  # unique on its page, and the name of the picture
    title: str
    note: str
    x: Axis


@dataclass(frozen=True, slots=True)
class Chart(Plot):
    """Lines over one axis."""

    y: Axis
    lines: tuple[ChartLine, ...]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(drawn(line_colour, self) for line_colour in self.lines)


@dataclass(frozen=True, slots=True)
class Bars(Plot):
    """Stacked bars, one a row, from left to right."""

    rows: tuple[str, ...]  # names, from top to bottom
    parts: tuple[tuple[str, Values], ...]  # (name, lengths by row), stacked in this order

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(value for _, values in self.parts for value in values)


@dataclass(frozen=True, slots=True)
class Heat(Plot):
    """A map of many rows over time."""

    xs: Values  # values of the columns
    rows: tuple[str, ...]  # names, from top to bottom
    z: tuple[Values, ...]  # values shown by colour, (rows, columns)
    unit: Axis = field(default=Axis(""))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not self._values()

    def _values(self) -> list[float]:
        return sorted(value for row in self.z for value in row if value is not None)

    @property
    def top(self) -> float:
        """The value of the strongest colour; larger ones share it, lest peaks hide the rest."""
        values = self._values()
        high = values[math.ceil(0.95 * len(values)) - 1]
        return (high if 0.0 < high < values[-1] / 3 else values[-1]) or 1.0

    @property
    def scale(self) -> str:
        """The label of the colours, and whether larger values exist."""
        if self._values()[-1] <= self.top:
            return self.unit.title
        top = duration(self.top) if self.unit.unit == "seconds" else significant(self.top)
        return f"{self.unit.title}, up to {top} and more"


Figure = Chart | Bars | Heat


def drawn(line_colour: ChartLine, chart: Chart) -> list[tuple[float, float]]:
    """Return the points of a line that its chart can show."""
    return [
        (x, y)
        for x, y in zip(line_colour.x, line_colour.y, strict=True)
        if x is not None and y is not None and _shows(chart.x, x) and _shows(chart.y, y)
    ]


def _shows(axis: Axis, value: float) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log)


def extent(chart: Chart) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return ((min x, max x), (min y, max y)) of a chart that is not empty."""
    points = [point for line_colour in chart.lines for point in drawn(line_colour, chart)]
    xs, ys = zip(*points, strict=True)
    return (min(xs), max(xs)), (min(ys), max(ys))


def ticks(axis: Axis, low: float, high: float) -> tuple[tuple[float, str], ...]:
    """Return the ticks of an axis from `low` to `high`; none where plain numbers will do."""
    if axis.ticks or not (axis.log or axis.unit == "seconds"):
        return axis.ticks
    if not axis.log:
        return tuple((value, _label(value, axis.unit)) for value in even(low, high))
    span = math.log10(high / low)
    if span < 0.5:
        return tuple((value, _label(value, axis.unit)) for value in even(low, high))
    steps = (1,) if span > 3 else (1, 3) if span > 1.6 else (1, 2, 5)
    every = 2 if span > 6 else 1
    marks = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        if power % every:
            continue
        for step in steps:
            value = step * 10.0**power
            if low / 1.001 <= value <= high * 1.001:
                marks.append((value, _label(value, axis.unit)))
    return tuple(marks)


def even(low: float, high: float) -> list[float]:
    """Return about five round values at even distances, from `low` to `high`."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _label(value: float, unit: Unit) -> str:
    if unit == "seconds":
        return duration(value)
    return f"{value:,.6g}" if value < 1e6 else f"{value:.0e}"


def duration(seconds: float, digits: int = 4, *, keep: bool = False) -> str:
    """Return a time in a fitting unit, with at most `digits` significant digits.

    With `keep`, zeros at the end stay where the number was rounded.
    """
    size = abs(seconds)
    if size == 0.0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if size >= 0.9995 * scale:
            return f"{significant(seconds / scale, digits, keep=keep)} {unit}"
    return f"{significant(seconds * 1e9, digits, keep=keep)} ns"


def significant(value: float, digits: int = 4, *, keep: bool = False) -> str:
    """Return a number with at most `digits` significant digits, and thousands separators.

    With `keep`, zeros at the end stay where the number was rounded.
    """
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size >= 15 or size < -5:
        return f"{value:.{digits - 1}e}"
    after = max(0, digits - 1 - size)
    text = f"{value:,.{after}f}"
    if "." not in text or (keep and float(text.replace(",", "")) != value):
        return text
    return text.rstrip("0").rstrip(".")


def padded(low: float, high: float, axis: Axis) -> tuple[float, float]:
    """Return a range around values, with some room."""
    if axis.ticks:
        values = [value for value, _ in axis.ticks]
        return min(low, *values) - 0.3, max(high, *values) + 0.3
    if axis.log:
        room = max(0.04 * math.log10(high / low), 0.05)
        return low / 10**room, high * 10**room
    if axis.zero or axis.unit == "share":
        low = min(low, 0.0)
        high = high or 1.0
    room = 0.05 * (high - low) or 0.5
    return (low if low == 0.0 else low - room), high + room


def loose(chart: Chart) -> bool:
    """Whether points are shown, which need room at the sides."""
    return any(line_colour.marks or line_colour.bare for line_colour in chart.lines)


def line_colour(index: int) -> str:
    """Return the name of a line's colour; -1 is that of the paper's figures."""
    return "muted" if index < 0 else f"c{index % LINES}"
