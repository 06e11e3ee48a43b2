"""Figures as pictures: PNG, drawn without a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    FuncFormatter,
    NullLocator,
    PercentFormatter,
)

from pigou.report import figure
from pigou.report.figure import Axis, Bars, Chart, Figure, Heat, extent, loose, padded, ticks

_COLOURS = figure.COLOURS["light"]
_STROKES = {"solid": "-", "dash": (0, (5, 2)), "dot": (0, (1.5, 1.8))}
_WIDTH, _HEIGHT, _DPI = 8.0, 3.8, 160


def png(figure: Figure, path: Path) -> None:
    """Draw a figure that is not empty, and write it.

    Raises:
        OSError: it cannot be written.
    """
    height = _HEIGHT
    if isinstance(figure, Chart) and figure.y.ticks:
        height = 2.2
    elif isinstance(figure, Bars):
        height = 1.4 + 0.36 * len(figure.rows)
    elif isinstance(figure, Heat):
        height = min(7.0, 1.6 + 0.16 * len(figure.rows))
    canvas = Canvas(figsize=(_WIDTH, height), layout="constrained", facecolor=_COLOURS["paper"])
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    canvas.suptitle(
        figure.title, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=_COLOURS["ink"]
    )
    if isinstance(figure, Chart):
        _chart(axes, figure)
    elif isinstance(figure, Bars):
        _bars(axes, figure)
    else:
        _heat(canvas, axes, figure)
    _style_axes(axes)
    canvas.savefig(path, format="png", dpi=_DPI, metadata={"Software": None})


def _chart(axes: Any, chart: Chart) -> None:
    (left, right), (low, high) = extent(chart)
    for line in chart.lines:
        points = [
            (float("nan"), float("nan")) if x is None or y is None else (x, y)
            for x, y in zip(line.x, line.y, strict=True)
        ]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.plot(
            xs, ys, label=line.name, color=_COLOURS[figure.line_colour(line.colour)], linewidth=1.6,
            linestyle="none" if line.bare else _STROKES[line.stroke], markersize=4,
            marker="o" if line.marks or line.bare else None,
            drawstyle="steps-post" if line.step else "default",
        )  # fmt: skip
    _axis(axes.xaxis, axes.set_xlim, axes.set_xscale, chart.x, left, right, tight=not loose(chart))
    _axis(axes.yaxis, axes.set_ylim, axes.set_yscale, chart.y, low, high)
    _legend(axes, len(chart.lines))


def _bars(axes: Any, bars: Bars) -> None:
    rows = range(len(bars.rows))
    begin = [0.0] * len(bars.rows)
    for number, (name, values) in enumerate(bars.parts):
        lengths = [value or 0.0 for value in values]
        colour = _COLOURS[figure.line_colour(number)]
        axes.barh(
            rows, lengths, left=begin, label=name, color=colour, height=0.62,
            edgecolor=_COLOURS["paper"], linewidth=0.6,
        )  # fmt: skip
        begin = [a + b for a, b in zip(begin, lengths, strict=True)]
    axes.set_yticks(rows, bars.rows)
    axes.invert_yaxis()
    _axis(axes.xaxis, axes.set_xlim, axes.set_xscale, bars.x, 0.0, max(begin))
    _legend(axes, len(bars.parts))


def _heat(canvas: Canvas, axes: Any, heat: Heat) -> None:
    scale = LinearSegmentedColormap.from_list(
        "pigou", [_COLOURS[name] for name in ("h0", "h1", "h2")]
    )
    z = [[float("nan") if value is None else value for value in row] for row in heat.z]
    xs = [value for value in heat.xs if value is not None]
    image = axes.imshow(
        z, aspect="auto", cmap=scale, interpolation="nearest", vmin=0.0, vmax=heat.top,
        extent=(min(xs), max(xs) if len(xs) > 1 else min(xs) + 1, len(heat.rows), 0),
    )  # fmt: skip
    every = max(1, len(heat.rows) // 24)
    axes.set_yticks(
        [row + 0.5 for row in range(0, len(heat.rows), every)], heat.rows[::every], fontsize=7
    )
    axes.set_xlabel(heat.x.title)
    bar = canvas.colorbar(image, ax=axes, label=heat.scale, pad=0.01)
    if heat.unit.unit == "share":
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif marks := ticks(heat.unit, 0.0, heat.top):
        bar.ax.yaxis.set_major_locator(FixedLocator([value for value, _ in marks]))
        bar.ax.yaxis.set_major_formatter(FixedFormatter([text for _, text in marks]))
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=_COLOURS["muted"], length=0, labelsize=8)
    bar.ax.yaxis.label.set(color=_COLOURS["muted"], fontsize=8.5)


def _axis(
    axis: Any, limit: Any, scale: Any, what: Axis, low: float, high: float, *, tight: bool = False
) -> None:
    low_, high_ = padded(low, high, what)
    if tight and not what.log and high > low:
        low_, high_ = low, high
    if what.log:
        scale("log")
    limit(low_, high_)
    axis.set_label_text(what.title)
    marks = ticks(what, low_, high_)
    if marks:
        axis.set_major_locator(FixedLocator([value for value, _ in marks]))
        axis.set_major_formatter(FixedFormatter([text for _, text in marks]))
    elif what.unit == "share":
        axis.set_major_formatter(PercentFormatter(1.0))
    else:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_locator(NullLocator())


def _legend(axes: Any, entries: int) -> None:
    if entries > 1:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=min(entries, 4), frameon=False,
            fontsize=8.5, labelcolor=_COLOURS["ink"], borderaxespad=0.2,
        )  # fmt: skip


def _style_axes(axes: Any) -> None:
    axes.set_facecolor(_COLOURS["paper"])
    if not axes.images:
        axes.grid(True, color=_COLOURS["grid"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_COLOURS["muted"], length=0, labelsize=8.5)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(_COLOURS["grid"])
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(_COLOURS["muted"])
        label.set_fontsize(9)
