"""The page that compares several runs; ratios are to the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pigou.config import ConfigError
from pigou.report.figure import LINES, STROKES, Axis, Chart, ChartLine, Stroke, Unit, duration
from pigou.report.page import Cell, Form, ReportPage, ReportTable, Section, of_runs
from pigou.report.run_figures import FIGURES, LATENCIES, REGIMES, TIME
from pigou.report.run_page import COUNTS, flat, notices, said, tier_name, tier_shares
from pigou.report.run_record import Attainment, Distribution, RunRecord

#: Runs that can be told apart by colour and stroke.
MAX_RUNS = LINES * len(STROKES)
_CDFS = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "client_wait_s")
_NO_RATIO = ("wall_s", "peak_rss_mb")
#: Figures over time that are compared: summed names, title, axis.
_OVER_TIME: tuple[tuple[str, tuple[str, ...], str, Axis], ...] = (
    ("running", ("running",), "Requests that run", Axis("requests", zero=True)),
    ("waiting", ("client", "queued", "waiting"), "Requests that do not run, wherever they are",
     Axis("requests", zero=True)),
    ("regime", ("regime",), "Regime", Axis("", ticks=REGIMES)),
    ("poa", ("poa",), "Price of Anarchy", Axis("ratio")),
)  # fmt: skip


def page(runs: Sequence[RunRecord], labels: Sequence[str]) -> ReportPage:
    """Return the page that compares runs.

    Raises:
        ConfigError: there are too few or too many, or labels are not all different.
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        raise ConfigError(f"{len(runs)} runs; give 2 to {MAX_RUNS}")
    if len(set(labels)) != len(runs):
        raise ConfigError(f"labels are {list(labels)}; they must be different, one a run")
    notes = [f"{label}: {notice}" for run, label in zip(runs, labels, strict=True)
             for notice in notices(run)]  # fmt: skip
    without_curves = [label for run, label in zip(runs, labels, strict=True) if not run.curves]
    if without_curves:
        notes.append(
            f"{', '.join(without_curves)}: figures only, from --json, so lines are missing. Run "
            "with --report DIR to have them."
        )
    return ReportPage(
        title=f"{len(runs)} runs beside each other",
        subtitle=f"Ratios are to the first, {labels[0]}.",
        notices=tuple(notes),
        verdict=of_runs(runs, labels),
        sections=(
            Section("summary", "Summary", (counts(runs, labels), *_latencies(runs, labels))),
            Section("latency", "Latency", tuple(_cdf(name, runs, labels) for name in _CDFS)),
            Section(
                "attained", "Attainment",
                (
                    *(_attained(name, runs, labels) for name in ("ttft_s", "tpot_s", "e2e_s")),
                    attainments(runs, labels),
                ),
            ),
            Section("against-load", "Load", _loads(runs, labels)),
            Section("timeline", "Timeline", _timelines(runs, labels)),
            Section("configuration", "Configuration", (differences(runs, labels),)),
        ),
    )  # fmt: skip


def style(index: int) -> tuple[int, Stroke]:
    """Return a run's colour and stroke."""
    return index % LINES, STROKES[index // LINES % len(STROKES)]


def _line(
    runs: Sequence[RunRecord], labels: Sequence[str],
    points: Callable[[RunRecord], tuple[Sequence[float | None], Sequence[float | None]] | None],
    *, step: bool = False,
) -> tuple[ChartLine, ...]:  # fmt: skip
    lines = []
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        xy = points(run)
        if xy is not None:
            lines.append(ChartLine(label, *xy, *style(index), step=step))
    return tuple(lines)


def _paired(values: Sequence[Any], form: Form, *, ratios: bool = True) -> list[Cell]:
    cells = [Cell(values[0], form)]
    for value in values[1:]:
        cells.append(Cell(value, form))
        if ratios:
            cells.append(Cell(_ratio(value, values[0]), "ratio"))
    return cells


def _ratio(above: Any, below: Any) -> float | None:
    if not isinstance(above, int | float) or not isinstance(below, int | float) or not below:
        return None
    quotient = above / below
    return quotient if math.isfinite(quotient) else None


def _headings(labels: Sequence[str]) -> tuple[str, ...]:
    rest = (text for label in labels[1:] for text in (label, "ratio"))
    return ("", labels[0], *rest)


def counts(runs: Sequence[RunRecord], labels: Sequence[str]) -> ReportTable:
    """Return counts and rates of all runs, with ratios to the first."""
    rows = [
        (Cell(name), *_paired([run.figures.get(key) for run in runs], form,
                              ratios=key not in _NO_RATIO))
        for key, (name, form) in COUNTS.items() if key not in _NO_RATIO
    ]  # fmt: skip
    shares = [tier_shares(run.figures) for run in runs]
    for level in dict.fromkeys(level for own in shares for level in own):
        rows.append((Cell(tier_name(level)), *_paired([own.get(level) for own in shares], "share")))
    anarchies = [run.figures.get("poa") or {} for run in runs]
    whole = [poa.get("whole") if poa.get("interval") else None for poa in anarchies]
    rows.append((Cell("Price of Anarchy"), *_paired(whole, "")))
    return ReportTable("counts", "Counts and rates", _headings(labels), tuple(rows))


def _latencies(runs: Sequence[RunRecord], labels: Sequence[str]) -> tuple[ReportTable, ...]:
    tables = []
    for key, name in LATENCIES.items():
        spreads = [run.figures.get(key) or {} for run in runs]
        rows = tuple(
            (Cell(statistic), *_paired([spread.get(statistic) for spread in spreads], "seconds"))
            for statistic in FIGURES
        )
        tables.append(ReportTable(f"latency-{key}", name, _headings(labels), rows))
    return tuple(tables)


def _cdf(name: str, runs: Sequence[RunRecord], labels: Sequence[str]) -> Chart:
    def points(run: RunRecord) -> tuple[list[float], list[float]] | None:
        curve = run.curves.get(name)
        return None if curve is None else (curve.value, curve.share)

    return Chart(
        f"cdf-{name}",
        LATENCIES[name],
        "How many took no longer; of gaps, or of served requests.",
        Axis("latency", "seconds", log=True),
        Axis("share", "share"),
        _line(runs, labels, points),
    )


def _attained(name: str, runs: Sequence[RunRecord], labels: Sequence[str]) -> Chart:
    def points(run: RunRecord) -> tuple[list[float], list[float]] | None:
        if run.attainment is None:
            return None
        curve: Distribution = run.attainment.curves[name]
        return curve.value, curve.share

    return Chart(
        f"attained-{name}",
        f"Attainment: {LATENCIES[name].lower()}",
        "Share of all offered requests that were served within a limit.",
        Axis("limit", "seconds", log=True),
        Axis("share of offered requests", "share", zero=True),
        _line(runs, labels, points),
    )


def attainments(runs: Sequence[RunRecord], labels: Sequence[str]) -> ReportTable:
    """Return the shares of offered requests that keep two limits, with ratios to the first."""
    grids = [{} if run.attainment is None else shares(run.attainment) for run in runs]
    limits = dict.fromkeys(limit for grid in grids for limit in grid)
    rows = tuple(
        (
            Cell(f"{duration(ttft)}, {duration(tpot)}"),
            *_paired([grid.get((ttft, tpot)) for grid in grids], "share"),
        )
        for ttft, tpot in limits
    )
    return ReportTable(
        "attainments", "Attainment of two limits at once: first token, and per token",
        _headings(labels), rows, "Share of all offered requests.", folded=True,
    )  # fmt: skip


def shares(attainment: Attainment) -> dict[tuple[float, float], float]:
    """Return a grid of attainment by (limit of first token, limit per token)."""
    return {
        (ttft, tpot): share
        for ttft, row in zip(attainment.ttft_s, attainment.grid, strict=True)
        for tpot, share in zip(attainment.tpot_s, row, strict=True)
    }


def _loads(runs: Sequence[RunRecord], labels: Sequence[str]) -> tuple[Chart, ...]:
    ranges = []
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        rate, ttft = run.figures.get("throughput_rps"), run.figures["ttft_s"]
        if rate and ttft["p50"] is not None:
            pair = [ttft["p50"], ttft["p99"]]
            ranges.append(ChartLine(label, [rate, rate], pair, *style(index), marks=True))
    overall = Chart(
        "ttft-throughput", "Time to first token against throughput",
        "A run's p50, and its p99 above.",
        Axis("requests per second", zero=True), Axis("latency", "seconds", log=True), tuple(ranges),
    )  # fmt: skip
    return overall, *(
        _against(f"load-{figure}", title, figure, runs, labels)
        for figure, title in (
            ("ttft_s", "Time to first token, p99, against load"),
            ("tpot_s", "Time per token, p99, against load"),
        )
    )


def _against(
    id_: str, title: str, figure: str, runs: Sequence[RunRecord], labels: Sequence[str]
) -> Chart:
    def points(run: RunRecord) -> tuple[list[float], list[float]] | None:
        points_ = [point for point in run.load if getattr(point, figure) is not None]
        xy = [point.inflight for point in points_], [getattr(point, figure)[1] for point in points_]
        return xy if points_ else None

    unit: Unit = "seconds"
    note = "By the requests under way when a request was meant to be sent."
    return Chart(
        id_, title, note, Axis("requests in flight"), Axis("latency", unit, log=True),
        tuple(ChartLine(x.name, x.x, x.y, x.colour, x.stroke, marks=True)
              for x in _line(runs, labels, points)),
    )  # fmt: skip


def _timelines(runs: Sequence[RunRecord], labels: Sequence[str]) -> tuple[Chart, ...]:
    charts = []
    for key, parts, title, axis in _OVER_TIME:

        def points(
            run: RunRecord, parts: tuple[str, ...] = parts
        ) -> tuple[list[float], list[float | None]] | None:
            if run.samples is None:
                return None
            columns = zip(*(run.samples.fleet[part] for part in parts), strict=True)
            return run.samples.time_s, [
                None if None in values else math.fsum(v for v in values if v is not None)
                for values in columns
            ]

        lines = _line(runs, labels, points, step=key in ("regime", "poa"))
        charts.append(Chart(f"time-{key}", title, "", TIME, axis, lines))
    return tuple(charts)


def differences(runs: Sequence[RunRecord], labels: Sequence[str]) -> ReportTable:
    """Return the settings that are not the same in all runs."""
    known = [(run, label) for run, label in zip(runs, labels, strict=True) if run.config]
    settings = [flat(run.config) for run, _ in known]
    keys = dict.fromkeys(key for setting in settings for key in setting)
    rows = tuple(
        (Cell(key), *(Cell(said(setting[key]) if key in setting else None) for setting in settings))
        for key in keys
        if any(key not in setting or setting[key] != settings[0].get(key) for setting in settings)
    )
    note = "" if rows else "All settings that are known are the same."
    return ReportTable(
        "differences", "What differs", ("setting", *(label for _, label in known)), rows, note
    )
