"""Figures of a planner: the objective, the workers of each pool over time, and its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pigou.report.figure import Axis, Chart, ChartLine
from pigou.report.table import Cell, Form, ReportTable
from pigou.report.timeline_figures import TIME

#: Decisions that a page shows; `--json` has them all.
_MAX_DECISIONS = 200
_TOTALS: dict[str, tuple[str, Form]] = {
    "name": ("Planner", ""),
    "gpu_hours": ("GPU-hours", ""),
    "moves": ("Moves of workers", ""),
    "reversals": ("Reversals", ""),
    "settle_s": ("Time to settle", "seconds"),
    "peak_workers": ("Workers at most", ""),
}


def objectives(figures: Mapping[str, Any]) -> ReportTable:
    """Return the objectives, and the shares of offered requests that attained them."""
    slo = figures["slo"]
    rows = [_objective("all requests", figures["offered"], slo)]
    rows += [
        _objective(name, terms["offered"], terms) for name, terms in slo.get("classes", {}).items()
    ]
    columns = ("requests", "offered", "TTFT within", "ITL within", "wanted", "attained")
    note = "TTFT from the intention to send; ITL is the mean of a request. All offered ones count."
    return ReportTable("objectives", "Objectives", columns, tuple(rows), note)


def _objective(name: str, count: int, terms: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        Cell(name), Cell(count), Cell(terms["ttft_s"], "seconds"), Cell(terms["itl_s"], "seconds"),
        Cell(terms["percentile"] / 100, "share"), Cell(terms["attained"], "share"),
    )  # fmt: skip


def totals(planner: Mapping[str, Any]) -> ReportTable:
    """Return what a planner did, and what that cost, by role and state."""
    rows = [(Cell(title), Cell(planner[key], form)) for key, (title, form) in _TOTALS.items()]
    rows += [
        (Cell(f"GPU-hours, {role}, {state}"), Cell(hours))
        for role, times in planner["gpu_hours_by_role"].items()
        for state, hours in times.items()
    ]
    return ReportTable("planner", "What the planner did", ("", "figure"), tuple(rows))


def replicas(planner: Mapping[str, Any], end_s: float) -> Chart:
    """Return the workers of each pool over time: those that serve, and all that hold GPUs."""
    entries = planner["replicas"]
    times = [*(entry["at_s"] for entry in entries), end_s]
    lines = []
    for colour, pool in enumerate(entries[0]["pools"] if entries else ()):
        counts = [entry["pools"][pool] for entry in entries]
        counts.append(counts[-1])
        active = [count["active"] for count in counts]
        total = [sum(count.values()) for count in counts]
        lines.append(ChartLine(f"{pool}, active", times, active, colour, step=True))
        lines.append(ChartLine(f"{pool}, all", times, total, colour, "dot", step=True))
    return Chart(
        "replicas", "Workers of each pool",
        "Active ones serve; all are those that start or drain, too.",
        TIME, Axis("workers", zero=True), tuple(lines),
    )  # fmt: skip


def decisions(planner: Mapping[str, Any]) -> ReportTable:
    """Return the decisions: when, what, and why."""
    rows = []
    for entry in planner["decisions"][:_MAX_DECISIONS]:
        refusals = [f"refused: {reason}" for reason in entry.get("refused", ())]
        reasons = "; ".join((*entry["reasons"], *refusals))
        actions = "; ".join(map(_action, entry["actions"]))
        rows.append((Cell(entry["at_s"], "seconds"), Cell(actions), Cell(reasons or "–")))
    count = len(planner["decisions"])
    note = f"The first {_MAX_DECISIONS} of {count:,}." if count > _MAX_DECISIONS else ""
    return ReportTable("decisions", "Decisions", ("at", "actions", "reasons"), tuple(rows),
                       note, folded=True)  # fmt: skip


def _action(action: Mapping[str, Any]) -> str:
    """Return an action in words: `add workers decode 2`."""
    words = [str(value) for key, value in action.items() if key != "kind"]
    return " ".join((action["kind"].replace("_", " "), *words))
