"""The page of several runs beside each other; ratios are to the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pigou.report.figure import LINES, STROKES, Axis, Chart, Line, Stroke, Unit, duration
from pigou.report.latency_figures import FIGURES, LATENCIES
from pigou.report.page import Page, Section
from pigou.report.run_page import COUNTS, flat, notices, said
from pigou.report.run_record import Attainment, Curve, Record
from pigou.report.table import Cell, Form, Table
from pigou.report.timeline_figures import REGIMES, TIME
from pigou.report.verdict import of_runs

#: Runs that can be told apart by colour and stroke.
MOST = LINES * len(STROKES)
_CDFS = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "client_wait_s")
_NO_RATIO = ("wall_s", "peak_rss_mb")
#: What a sample of the fleet is worth beside other runs: names that are added, title, axis.
_OVER_TIME: tuple[tuple[str, tuple[str, ...], str, Axis], ...] = (
    ("running", ("running",), "Requests that run", Axis("requests", zero=True)),
    ("waiting", ("client", "queued", "waiting"), "Requests that do not run, wherever they are",
     Axis("requests", zero=True)),
    ("regime", ("regime",), "Regime", Axis("", ticks=REGIMES)),
    ("poa", ("poa",), "Price of Anarchy", Axis("ratio")),
)  # fmt: skip


def page(runs: Sequence[Record], labels: Sequence[str]) -> Page:
    """Return the page of runs beside each other.

    Args:
        runs: two or more, at most `MOST`.
        labels: what each is called, all different.

    Raises:
        ValueError: there are too few or too many, or labels are not all different.
    """
    if not 2 <= len(runs) <= MOST:
        raise ValueError(f"{len(runs)} runs; give 2 to {MOST}")
    if len(set(labels)) != len(runs):
        raise ValueError(f"labels are {list(labels)}; they must be different, one a run")
    found = [f"{label}: {notice}" for run, label in zip(runs, labels, strict=True)
             for notice in notices(run)]  # fmt: skip
    bare = [label for run, label in zip(runs, labels, strict=True) if not run.curves]
    if bare:
        found.append(
            f"{', '.join(bare)}: figures only, from --json, so lines are missing. Run with "
            "--report DIR to have them."
        )
    return Page(
        title=f"{len(runs)} runs beside each other",
        subtitle=f"Ratios are to the first, {labels[0]}.",
        notices=tuple(found),
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


def style(place: int) -> tuple[int, Stroke]:
    """Return a run's colour and stroke."""
    return place % LINES, STROKES[place // LINES % len(STROKES)]


def _line(
    runs: Sequence[Record], labels: Sequence[str],
    points: Callable[[Record], tuple[Sequence[float | None], Sequence[float | None]] | None],
    *, step: bool = False,
) -> tuple[Line, ...]:  # fmt: skip
    found = []
    for place, (run, label) in enumerate(zip(runs, labels, strict=True)):
        there = points(run)
        if there is not None:
            found.append(Line(label, *there, *style(place), step=step))
    return tuple(found)


def _paired(values: Sequence[Any], form: Form, *, ratios: bool = True) -> list[Cell]:
    """Return each value, and from the second on its ratio to the first."""
    cells = [Cell(values[0], form)]
    for value in values[1:]:
        cells.append(Cell(value, form))
        if ratios:
            cells.append(Cell(_ratio(value, values[0]), "ratio"))
    return cells


def _ratio(above: Any, below: Any) -> float | None:
    if not isinstance(above, int | float) or not isinstance(below, int | float) or not below:
        return None
    found = above / below
    return found if math.isfinite(found) else None


def _headings(labels: Sequence[str]) -> tuple[str, ...]:
    rest = (text for label in labels[1:] for text in (label, "ratio"))
    return ("", labels[0], *rest)


def counts(runs: Sequence[Record], labels: Sequence[str]) -> Table:
    """Return counts and rates of all runs, with ratios to the first."""
    rows = [
        (Cell(name), *_paired([run.figures.get(key) for run in runs], form,
                              ratios=key not in _NO_RATIO))
        for key, (name, form) in COUNTS.items() if key not in _NO_RATIO
    ]  # fmt: skip
    whole = [run.figures.get("poa", {}).get("whole") for run in runs]
    rows.append((Cell("Price of Anarchy"), *_paired(whole, "")))
    return Table("counts", "Counts and rates", _headings(labels), tuple(rows))


def _latencies(runs: Sequence[Record], labels: Sequence[str]) -> tuple[Table, ...]:
    """Return a table for each figure of latency, with ratios to the first run."""
    found = []
    for key, name in LATENCIES.items():
        spreads = [run.figures.get(key) or {} for run in runs]
        rows = tuple(
            (Cell(each), *_paired([spread.get(each) for spread in spreads], "seconds"))
            for each in FIGURES
        )
        found.append(Table(f"latency-{key}", name, _headings(labels), rows))
    return tuple(found)


def _cdf(name: str, runs: Sequence[Record], labels: Sequence[str]) -> Chart:
    def points(run: Record) -> tuple[list[float], list[float]] | None:
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


def _attained(name: str, runs: Sequence[Record], labels: Sequence[str]) -> Chart:
    def points(run: Record) -> tuple[list[float], list[float]] | None:
        if run.attainment is None:
            return None
        curve: Curve = run.attainment.curves[name]
        return curve.value, curve.share

    return Chart(
        f"attained-{name}",
        f"Attainment: {LATENCIES[name].lower()}",
        "Share of all offered requests that were served within a limit.",
        Axis("limit", "seconds", log=True),
        Axis("share of offered requests", "share", zero=True),
        _line(runs, labels, points),
    )


def attainments(runs: Sequence[Record], labels: Sequence[str]) -> Table:
    """Return the shares of offered requests that keep two limits, with ratios to the first."""
    found = [{} if run.attainment is None else shares(run.attainment) for run in runs]
    limits = dict.fromkeys(limit for each in found for limit in each)
    rows = tuple(
        (
            Cell(f"{duration(ttft)}, {duration(tpot)}"),
            *_paired([each.get((ttft, tpot)) for each in found], "share"),
        )
        for ttft, tpot in limits
    )
    return Table(
        "attainments", "Attainment of two limits at once: first token, and per token",
        _headings(labels), rows, "Share of all offered requests.", folded=True,
    )  # fmt: skip


def shares(found: Attainment) -> dict[tuple[float, float], float]:
    """Return a grid of attainment by (limit of first token, limit per token)."""
    return {
        (ttft, tpot): share
        for ttft, row in zip(found.ttft_s, found.grid, strict=True)
        for tpot, share in zip(found.tpot_s, row, strict=True)
    }


def _loads(runs: Sequence[Record], labels: Sequence[str]) -> tuple[Chart, ...]:
    """Return latency against throughput, and against requests in flight."""
    ranges = []
    for place, (run, label) in enumerate(zip(runs, labels, strict=True)):
        rate, found = run.figures.get("throughput_rps"), run.figures["ttft_s"]
        if rate and found["p50"] is not None:
            pair = [found["p50"], found["p99"]]
            ranges.append(Line(label, [rate, rate], pair, *style(place), marks=True))
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
    id_: str, title: str, figure: str, runs: Sequence[Record], labels: Sequence[str]
) -> Chart:
    def points(run: Record) -> tuple[list[float], list[float]] | None:
        there = [each for each in run.load if getattr(each, figure) is not None]
        found = [each.inflight for each in there], [getattr(each, figure)[1] for each in there]
        return found if there else None

    unit: Unit = "seconds"
    note = "By the requests under way when a request was meant to be sent."
    return Chart(
        id_, title, note, Axis("requests in flight"), Axis("latency", unit, log=True),
        tuple(Line(x.name, x.x, x.y, x.colour, x.stroke, marks=True)
              for x in _line(runs, labels, points)),
    )  # fmt: skip


def _timelines(runs: Sequence[Record], labels: Sequence[str]) -> tuple[Chart, ...]:
    found = []
    for key, parts, title, axis in _OVER_TIME:

        def points(
            run: Record, parts: tuple[str, ...] = parts
        ) -> tuple[list[float], list[float | None]] | None:
            if run.samples is None:
                return None
            columns = zip(*(run.samples.fleet[part] for part in parts), strict=True)
            return run.samples.time_s, [
                None if None in values else math.fsum(v for v in values if v is not None)
                for values in columns
            ]

        lines = _line(runs, labels, points, step=key in ("regime", "poa"))
        found.append(Chart(f"time-{key}", title, "", TIME, axis, lines))
    return tuple(found)


def differences(runs: Sequence[Record], labels: Sequence[str]) -> Table:
    """Return the settings that are not the same in all runs."""
    known = [(run, label) for run, label in zip(runs, labels, strict=True) if run.config]
    settings = [flat(run.config) for run, _ in known]
    keys = dict.fromkeys(key for each in settings for key in each)
    rows = tuple(
        (Cell(key), *(Cell(said(each[key]) if key in each else None) for each in settings))
        for key in keys
        if any(key not in each or each[key] != settings[0].get(key) for each in settings)
    )
    note = "" if rows else "All settings that are known are the same."
    return Table(
        "differences", "What differs", ("setting", *(label for _, label in known)), rows, note
    )
