"""Figures and tables of latency: distributions, where time goes, attainment, and load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pigou.report.figure import Axis, Bars, Chart, ChartLine
from pigou.report.run_record import Attainment, Distribution, LoadPoint, RunRecord, Stage
from pigou.report.table import Cell, ReportTable, row

#: Figure -> its name.
LATENCIES = {
    "ttft_s": "Time to first token",
    "itl_s": "Between tokens",
    "tpot_s": "Per token after the first",
    "e2e_s": "End to end",
    "client_wait_s": "Wait at the client",
    "server_ttft_s": "First token, from sending",
    "server_e2e_s": "End to end, from sending",
}
FIGURES = ("mean", "p50", "p90", "p95", "p99")
SECONDS = Axis("latency", "seconds", log=True)
_SHARE = "share of served requests"


def latencies(figures: Mapping[str, Any]) -> ReportTable:
    """Return the table of latencies, from the figures of a run."""
    rows = tuple(
        row(name, [figures[key][statistic] for statistic in FIGURES], "seconds")
        for key, name in LATENCIES.items()
        if isinstance(figures.get(key), dict)
    )
    note = (
        "From the time that the client meant to send, unless it says from sending. A percentile is "
        "the k-th smallest of n values, k = share times n, rounded up; served requests only."
    )
    return ReportTable("latencies", "Latencies", ("", *FIGURES), rows, note)


def _lines(curves: Mapping[str, Distribution], names: Sequence[str]) -> tuple[ChartLine, ...]:
    return tuple(
        ChartLine(LATENCIES[name], curves[name].value, curves[name].share, index)
        for index, name in enumerate(names)
        if name in curves
    )


def request_cdf(run: RunRecord) -> Chart:
    """Return the distributions of requests' latencies."""
    return Chart(
        "latency-cdf",
        "Latency of requests",
        "How many of the served requests took no longer. The wait at the client is apart from the "
        "time that the fleet took; waits of 0 do not show.",
        SECONDS,
        Axis(_SHARE, "share"),
        _lines(run.curves, ("ttft_s", "server_ttft_s", "e2e_s", "client_wait_s")),
    )


def token_cdf(run: RunRecord) -> Chart:
    """Return the distributions of the gaps between tokens."""
    return Chart(
        "token-cdf",
        "Latency of tokens",
        "Between tokens: every gap of every stream. Per token: the mean gap of each request.",
        SECONDS,
        Axis("share", "share"),
        _lines(run.curves, ("itl_s", "tpot_s")),
    )


def stage_bars(stages_: Sequence[Stage]) -> Bars:
    """Return the time of requests by stage."""
    parts = (
        ("at the client", [stage.client_s for stage in stages_]),
        ("until workers are chosen", [stage.queue_s for stage in stages_]),
        ("to the first token", [stage.first_s for stage in stages_]),
        ("streaming", [stage.stream_s for stage in stages_]),
    )
    return Bars(
        "stages",
        "Where the time went",
        "Means of served requests, grouped by their end-to-end time. The way to the fleet counts "
        "to the second part.",
        Axis("mean time", "seconds", zero=True),
        tuple(f"{stage.group} ({stage.requests:,})" for stage in stages_),
        parts,
    )


def attainment_curve(attainment: Attainment | None) -> Chart:
    """Return the share of all offered requests that a limit lets pass."""
    lines = () if attainment is None else _lines(attainment.curves, ("ttft_s", "tpot_s", "e2e_s"))
    return Chart(
        "attainment",
        "Attainment by limit",
        "Share of all offered requests that were served within a limit. Those that failed, were "
        "refused or were cut off never are, so a line may end below 100%.",
        Axis("limit", "seconds", log=True),
        Axis("share of offered requests", "share", zero=True),
        lines,
    )


def attainment_grid(attainment: Attainment) -> ReportTable:
    """Return the share of all offered requests that keeps two limits at once."""
    rows = tuple(
        (Cell(ttft, "seconds"), *(Cell(share, "share", tint=share) for share in shares))
        for ttft, shares in zip(attainment.ttft_s, attainment.grid, strict=True)
    )
    columns = (
        "first token within",
        *(f"{1000 * limit:g} ms per token" for limit in attainment.tpot_s),
    )
    return ReportTable(
        "attainment-grid",
        "Attainment of two limits at once",
        columns,
        rows,
        f"Share of the {attainment.offered_requests:,} offered requests. One with a single token "
        "has no time per token, and keeps every limit of it.",
    )


def load_curve(id_: str, title: str, figure: str, load: Sequence[LoadPoint]) -> Chart:
    """Return p50 and p99 of a latency against the requests in flight."""
    points = [point for point in load if getattr(point, figure) is not None]
    x = [point.inflight for point in points]
    lines = tuple(
        ChartLine(name, x, [getattr(point, figure)[index] for point in points], index, marks=True)
        for index, name in enumerate(("p50", "p99"))
    )
    min_requests = min((point.requests for point in load), default=0)
    return Chart(
        id_,
        title,
        "By the requests under way when a request was meant to be sent, itself counted; each point "
        f"is of at least {min_requests} served requests.",
        Axis("requests in flight"),
        Axis("latency", "seconds", log=True),
        lines,
    )


def load_table(load: Sequence[LoadPoint]) -> ReportTable:
    """Return latency against load in figures."""
    rows = []
    for point in load:
        tpot = (None, None) if point.tpot_s is None else point.tpot_s
        values = (*point.ttft_s, *tpot, *point.e2e_s)
        seconds = [Cell(value, "seconds") for value in values]
        rows.append((Cell(point.inflight), Cell(point.requests), *seconds))
    columns = (
        "in flight", "requests", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50",
        "E2E p99",
    )  # fmt: skip
    return ReportTable("load", "Latency against load", columns, tuple(rows), folded=True)
