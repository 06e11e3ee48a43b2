"""Figures and tables of latency: distributions, where time goes, attainment, and load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pigou.report.figure import Axis, Bars, Chart, Line
from pigou.report.run_record import Attainment, Curve, Load, Record, Stage
from pigou.report.table import Cell, Table, row

#: Figure -> how it is called.
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


def latencies(figures: Mapping[str, Any]) -> Table:
    """Return the table of latencies, from the figures of a run."""
    rows = tuple(
        row(name, [figures[key][each] for each in FIGURES], "seconds")
        for key, name in LATENCIES.items()
        if isinstance(figures.get(key), dict)
    )
    note = (
        "From the time that the client meant to send, unless it says from sending. A percentile is "
        "the k-th smallest of n values, k = share times n, rounded up; served requests only."
    )
    return Table("latencies", "Latencies", ("", *FIGURES), rows, note)


def _lines(curves: Mapping[str, Curve], names: Sequence[str]) -> tuple[Line, ...]:
    return tuple(
        Line(LATENCIES[name], curves[name].value, curves[name].share, place)
        for place, name in enumerate(names)
        if name in curves
    )


def request_cdf(run: Record) -> Chart:
    """Return the distributions of what a request sees."""
    return Chart(
        "latency-cdf",
        "Latency of requests",
        "How many of the served requests took no longer. The wait at the client is apart from the "
        "time that the fleet took; waits of 0 do not show.",
        SECONDS,
        Axis(_SHARE, "share"),
        _lines(run.curves, ("ttft_s", "server_ttft_s", "e2e_s", "client_wait_s")),
    )


def token_cdf(run: Record) -> Chart:
    """Return the distributions of the gaps between tokens."""
    return Chart(
        "token-cdf",
        "Latency of tokens",
        "Between tokens: every gap of every stream. Per token: the mean gap of each request.",
        SECONDS,
        Axis("share", "share"),
        _lines(run.curves, ("itl_s", "tpot_s")),
    )


def stages(found: Sequence[Stage]) -> Bars:
    """Return where the time of requests went."""
    parts = (
        ("at the client", [each.client_s for each in found]),
        ("until workers are chosen", [each.queue_s for each in found]),
        ("to the first token", [each.first_s for each in found]),
        ("streaming", [each.stream_s for each in found]),
    )
    return Bars(
        "stages",
        "Where the time went",
        "Means of served requests, grouped by their end-to-end time. The way to the fleet counts "
        "to the second part.",
        Axis("mean time", "seconds", zero=True),
        tuple(f"{each.group} ({each.requests:,})" for each in found),
        parts,
    )


def attainment_curve(found: Attainment | None) -> Chart:
    """Return the share of all offered requests that a limit lets pass."""
    lines = () if found is None else _lines(found.curves, ("ttft_s", "tpot_s", "e2e_s"))
    return Chart(
        "attainment",
        "Attainment by limit",
        "Share of all offered requests that were served within a limit. Those that failed, were "
        "refused or were cut off never are, so a line may end below 100%.",
        Axis("limit", "seconds", log=True),
        Axis("share of offered requests", "share", zero=True),
        lines,
    )


def attainment_grid(found: Attainment) -> Table:
    """Return the share of all offered requests that keeps two limits at once."""
    rows = tuple(
        (Cell(ttft, "seconds"), *(Cell(share, "share", tint=share) for share in shares))
        for ttft, shares in zip(found.ttft_s, found.grid, strict=True)
    )
    columns = ("first token within", *(f"{1000 * limit:g} ms per token" for limit in found.tpot_s))
    return Table(
        "attainment-grid",
        "Attainment of two limits at once",
        columns,
        rows,
        f"Share of the {found.offered:,} offered requests. One with a single token has no time per "
        "token, and keeps every limit of it.",
    )


def load_curve(id_: str, title: str, figure: str, load: Sequence[Load]) -> Chart:
    """Return p50 and p99 of a latency against the requests in flight."""
    there = [each for each in load if getattr(each, figure) is not None]
    x = [each.inflight for each in there]
    lines = tuple(
        Line(name, x, [getattr(each, figure)[place] for each in there], place, marks=True)
        for place, name in enumerate(("p50", "p99"))
    )
    least = min((each.requests for each in load), default=0)
    return Chart(
        id_,
        title,
        "By the requests under way when a request was meant to be sent, itself counted; each point "
        f"is of at least {least} served requests.",
        Axis("requests in flight"),
        Axis("latency", "seconds", log=True),
        lines,
    )


def load_table(load: Sequence[Load]) -> Table:
    """Return latency against load in figures."""
    rows = []
    for each in load:
        tpot = (None, None) if each.tpot_s is None else each.tpot_s
        values = (*each.ttft_s, *tpot, *each.e2e_s)
        seconds = [Cell(value, "seconds") for value in values]
        rows.append((Cell(each.inflight), Cell(each.requests), *seconds))
    columns = (
        "in flight", "requests", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50",
        "E2E p99",
    )  # fmt: skip
    return Table("load", "Latency against load", columns, tuple(rows), folded=True)
