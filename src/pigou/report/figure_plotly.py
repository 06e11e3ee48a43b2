"""Figures as Plotly draws them. Colours are names (`@ink`), which the page's theme fills in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pigou.report import figure
from pigou.report.figure import (
    Axis,
    Bars,
    Chart,
    ChartLine,
    Figure,
    Heat,
    Values,
    duration,
    extent,
    loose,
    padded,
    ticks,
)

_HEIGHT, _LOW, _ROW = 340, 190, 34
#: How values of a map read under the pointer, by their unit.
_HOVER = {"": "%{z:,.4~g}", "seconds": "%{z:.4~s}s", "share": "%{z:.3~p}"}
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def drawing(figure: Figure) -> dict[str, Any]:
    """Return `{id, data, layout}` for Plotly; the figure is not empty."""
    if isinstance(figure, Chart):
        parts = _chart(figure)
    elif isinstance(figure, Bars):
        parts = _bars(figure)
    else:
        parts = _heat(figure)
    return {"id": figure.id, **parts}


def _chart(chart: Chart) -> dict[str, Any]:
    (left, right), (low, high) = extent(chart)
    layout = _layout(_LOW if chart.y.ticks else _HEIGHT, len(chart.lines))
    layout["xaxis"] = _axis(chart.x, left, right, tight=not loose(chart))
    layout["yaxis"] = _axis(chart.y, low, high)
    layout["hovermode"] = "x unified" if _aligned(chart.lines) else "closest"
    return {"data": [_line(line, chart) for line in chart.lines], "layout": layout}


def _aligned(lines: Sequence[ChartLine]) -> bool:
    return not lines[0].bare and all(list(line.x) == list(lines[0].x) for line in lines)


def _line(line: ChartLine, chart: Chart) -> dict[str, Any]:
    colour = "@" + figure.line_colour(line.colour)
    mode = "markers" if line.bare else "lines+markers" if line.marks else "lines"
    return {
        "type": "scatter",
        "name": line.name,
        "mode": mode,
        "x": _drawable(line.x, chart.x),
        "y": _drawable(line.y, chart.y),
        "line": {
            "color": colour, "width": 2, "dash": line.stroke,
            "shape": "hv" if line.step else "linear",
        },
        "marker": {"color": colour, "size": 7},
        "connectgaps": False,
        "cliponaxis": not (line.marks or line.bare),
        "text": [_hover_text(value, chart.y) for value in line.y],
        "customdata": [_hover_text(value, chart.x) for value in line.x],
        "hovertemplate": "%{text}<extra>%{fullData.name}</extra>"
        if _aligned(chart.lines)
        else "%{customdata}: %{text}<extra>%{fullData.name}</extra>",
    }  # fmt: skip


def _bars(bars: Bars) -> dict[str, Any]:
    layout = _layout(110 + _ROW * len(bars.rows), len(bars.parts))
    total_length = max(
        sum(values[k] or 0.0 for _, values in bars.parts) for k in range(len(bars.rows))
    )
    layout["xaxis"] = _axis(bars.x, 0.0, total_length)
    layout["yaxis"] = {"autorange": "reversed", "automargin": True, "tickfont": {"color": "@ink"}}
    layout["legend"]["traceorder"] = "normal"
    layout |= {"barmode": "stack", "bargap": 0.35, "hovermode": "closest"}
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": list(values),
            "y": list(bars.rows),
            "marker": {
                "color": f"@c{index}",
                "line": {"color": "@paper", "width": 1},
            },
            "text": [_hover_text(value, bars.x) for value in values],
            "textposition": "none",
            "hovertemplate": "%{y}: %{text}<extra>%{fullData.name}</extra>",
        }
        for index, (name, values) in enumerate(bars.parts)
    ]
    return {"data": data, "layout": layout}


def _heat(heat: Heat) -> dict[str, Any]:
    rows = len(heat.rows)
    layout = _layout(min(640, 110 + max(6, min(22, 560 // rows)) * rows), 0)
    xs = [value for value in heat.xs if value is not None]
    layout["xaxis"] = _axis(heat.x, min(xs), max(xs), tight=True)
    layout["yaxis"] = {
        "autorange": "reversed", "automargin": True, "type": "category",
        "tickfont": {"size": 11, "color": "@ink"}, "showgrid": False,
    }  # fmt: skip
    layout["hovermode"] = "closest"
    data = {
        "type": "heatmap",
        "x": list(heat.xs),
        "y": list(heat.rows),
        "z": [list(row) for row in heat.z],
        "colorscale": [[0.0, "@h0"], [0.5, "@h1"], [1.0, "@h2"]],
        "zmin": 0,
        "zmax": heat.top,
        "colorbar": {
            "thickness": 10, "outlinewidth": 0, "tickfont": {"color": "@muted"},
            **_scale(heat),
            "title": {
                "text": heat.scale, "side": "right", "font": {"color": "@muted", "size": 12.5},
            },
        },
        "hoverongaps": False,
        "hovertemplate": f"%{{y}}, %{{x}} s: {_HOVER[heat.unit.unit]}<extra></extra>",
    }  # fmt: skip
    return {"data": [data], "layout": layout}


def _scale(heat: Heat) -> dict[str, Any]:
    marks = ticks(heat.unit, 0.0, heat.top)
    if marks:
        return {"tickvals": [value for value, _ in marks], "ticktext": [text for _, text in marks]}
    return {"tickformat": ".3~p" if heat.unit.unit == "share" else "", "nticks": 5}


def _layout(height: int, entries: int) -> dict[str, Any]:
    return {
        "height": height,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": _FONT, "size": 13, "color": "@ink"},
        "margin": {"l": 64, "r": 16, "t": 34 if entries > 1 else 12, "b": 52},
        "showlegend": entries > 1,
        "legend": {
            "orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom",
            "font": {"color": "@ink"}, "itemwidth": 30,
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "@muted", "activecolor": "@ink"},
        "hoverlabel": {
            "bgcolor": "@paper", "bordercolor": "@grid", "font": {"color": "@ink", "size": 12.5},
        },
    }  # fmt: skip


def _axis(axis: Axis, low: float, high: float, *, tight: bool = False) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "title": {"text": axis.title, "font": {"color": "@muted", "size": 12.5}, "standoff": 10},
        "gridcolor": "@grid",
        "linecolor": "@grid",
        "zeroline": False,
        "automargin": True,
        "tickfont": {"color": "@muted", "size": 12},
    }
    low_, high_ = padded(low, high, axis)
    if tight and not axis.log and high > low:
        low_, high_ = low, high
    marks = ticks(axis, low_, high_)
    if marks:
        layout |= {
            "tickvals": [value for value, _ in marks],
            "ticktext": [text for _, text in marks],
        }
    elif axis.unit == "share":
        layout["tickformat"] = ".3~p"
    else:
        layout["separatethousands"] = True
    if axis.log:
        layout |= {"type": "log", "range": [math.log10(low_), math.log10(high_)]}
    else:
        layout["range"] = [low_, high_]
    return layout


def _drawable(values: Values, axis: Axis) -> list[float | None]:
    """Return values with those left out that a logarithmic axis cannot show."""
    return [
        value
        if value is not None and math.isfinite(value) and (value > 0 or not axis.log)
        else None
        for value in values
    ]


def _hover_text(value: float | None, axis: Axis) -> str:
    if value is None:
        return "–"
    for tick, label in axis.ticks:
        if value == tick:
            return label
    if axis.unit == "seconds":
        return duration(value)
    return f"{value:.1%}" if axis.unit == "share" else f"{value:,.4g}"
