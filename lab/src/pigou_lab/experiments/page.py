"""The page of an experiment: figures against concurrency, with the paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pigou.config import ConfigError
from pigou.report.figure import LINES, STROKES, Axis, Chart, ChartLine, Figure
from pigou.report.page import Cell, Form, PageVerdict, ReportPage, ReportTable, Section

Row = Mapping[str, Any]

#: Figure -> title, and the axis' title. Where rows have none of these, all numbers are drawn.
FIGURES = {
    "ttft_p99_s": ("Time to first token, p99", "latency"),
    "itl_p99_s": ("Between tokens, p99", "latency"),
    "rps": ("Throughput", "requests per second"),
    "poa_legacy": ("Price of Anarchy, the paper's index", "ratio"),
    "poa": ("Price of Anarchy", "ratio"),
    "attainment": ("Attainment", "share of offered requests"),
    "ttft_p50_s": ("Time to first token, p50", "latency"),
    "server_ttft_p99_s": ("First token from sending, p99", "latency"),
    "wait_p99_s": ("Wait at the client, p99", "latency"),
    "itl_p50_s": ("Between tokens, p50", "latency"),
    "tpot_p99_s": ("Time per token, p99", "latency"),
    "e2e_mean_s": ("End to end, mean", "latency"),
    "e2e_p99_s": ("End to end, p99", "latency"),
}
#: Numbers that are settings: an axis where concurrency does not change, else kinds of rows.
SETTINGS = ("overlap_weight", "temperature", "templates", "workers")
#: Largest over least value above which a figure is drawn by ratios.
_WIDE = 20.0


def experiment_page(name: str, document: Mapping[str, Any]) -> ReportPage:
    """Return the page of an experiment; raises ConfigError if there is nothing to draw."""
    title = str(document.get("experiment") or Path(name).stem)
    about = [f"{key} {document[key]}" for key in ("fleet", "reading") if document.get(key)]
    return page(document["rows"], title=title, subtitle=", ".join(about))


def page(
    rows: Sequence[Row], *, title: str, subtitle: str = "", against: str = "",
    paper: Sequence[Row] = (), figures: Sequence[str] = (),
) -> ReportPage:  # fmt: skip
    """Return the page of rows of figures; raises ConfigError if there is nothing to draw.

    Args:
        rows: a level, numbers, and texts that tell kinds of rows apart; each kind is one line.
            `paper` in a row holds the paper's values; each `experiment` gets a section.
        against: the level; by default concurrency where it varies, else a setting that does.
        paper: the paper's rows, joined by the level.
        figures: columns to draw; by default the known ones.
    """
    if not rows:
        raise ConfigError("rows are empty: the experiment has no results; run it again")
    names = dict.fromkeys(str(row.get("experiment", "")) for row in rows)
    sections = []
    for name in names:
        mine = [row for row in rows if str(row.get("experiment", "")) == name]
        front = f"{name}-" if len(names) > 1 else ""
        sections += _sections(mine, against or _level(mine), paper, figures, name, front)
    titles = {key: name for key, (name, _) in FIGURES.items()}
    verdict = of_rows(rows, titles)
    return ReportPage(title, subtitle or f"{len(rows)} rows", tuple(sections), verdict=verdict)


def _sections(
    rows: Sequence[Row], against: str, paper: Sequence[Row], figures: Sequence[str],
    name: str, front: str,
) -> list[Section]:  # fmt: skip
    for row in rows:
        if not _number(row.get(against)):
            raise ConfigError(f"a row has no number {against!r}: {dict(row)}")
    kinds = _kinds(_with_paper(rows, paper, against), against)
    names = tuple(figures) or _columns(rows, against)
    if not names:
        raise ConfigError(f"rows have no numbers but {against!r}: there is nothing to draw")
    missing = [figure for figure in names if not any(_number(row.get(figure)) for row in rows)]
    if missing:
        raise ConfigError(f"figures are {list(names)}, but no row has {', '.join(missing)}")
    charts: tuple[Figure, ...] = tuple(_chart(figure, kinds, against, front) for figure in names)
    tables = tuple(
        _table(f"{front}rows-{index}", kind, rows_of_kind, names, against)
        for index, (kind, rows_of_kind) in enumerate(kinds.items())
    )
    if front:
        return [Section(name, name, (*charts, *tables))]
    return [Section("figures", "Figures", charts), Section("numbers", "Numbers", tables)]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _changes(name: str, rows: Sequence[Row]) -> bool:
    return len({row[name] for row in rows if _number(row.get(name))}) > 1


def _level(rows: Sequence[Row]) -> str:
    axes = [name for name in ("concurrency", *SETTINGS) if _changes(name, rows)]
    return axes[0] if axes else "concurrency"


def _with_paper(rows: Sequence[Row], paper: Sequence[Row], against: str) -> list[Row]:
    papers = {row.get(against): row for row in paper}
    return [
        row if isinstance(row.get("paper"), Mapping)
        else {**row, "paper": papers.get(row[against], {})}
        for row in rows
    ]  # fmt: skip


def _columns(rows: Sequence[Row], against: str) -> tuple[str, ...]:
    known = [name for name in FIGURES if any(_number(row.get(name)) for row in rows)]
    others = dict.fromkeys(
        key for row in rows for key, value in row.items()
        if _number(value) and key not in (against, "seed", "concurrency", *SETTINGS)
    )  # fmt: skip
    return tuple(known or others)


def _kinds(rows: Sequence[Row], against: str) -> dict[str, list[Row]]:
    keys = dict.fromkeys(
        key for row in rows for key, value in row.items()
        if (isinstance(value, str) and not key.startswith("regime")
            and key not in ("experiment", "level_name"))
        or (key in SETTINGS and key != against)
    )  # fmt: skip
    telling = [key for key in keys if len({row.get(key) for row in rows}) > 1]
    kinds: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row[against]):
        parts = (
            f"{key.replace('_', ' ')} {row[key]:g}" if _number(row.get(key)) else str(row[key])
            for key in telling
            if row.get(key) not in (None, "")
        )
        kinds.setdefault(", ".join(parts) or "ours", []).append(row)
    return kinds


def _chart(name: str, kinds: Mapping[str, Sequence[Row]], against: str, front: str) -> Chart:
    title, unit = FIGURES.get(name, (name, name))
    lines = []
    papers = [
        [(row[against], row["paper"][name]) for row in rows if _number(row["paper"].get(name))]
        for rows in kinds.values()
    ]
    same_for_all = all(points_ == papers[0] for points_ in papers)
    for index, (kind, rows) in enumerate(kinds.items()):
        colour, stroke = index % LINES, STROKES[index // LINES % len(STROKES)]
        points = [(row[against], row[name]) for row in rows if _number(row.get(name))]
        lines.append(_line(kind, points, colour, stroke))
        if papers[index] and not same_for_all:
            lines.append(_line(f"{kind}: the paper", papers[index], colour, "dot"))
    if papers[0] and same_for_all:
        lines.insert(0, _line("the paper", papers[0], -1, "dash"))
    wide = _wide([value for line in lines for value in line.y if value is not None])
    levels = [value for line in lines for value in line.x if value is not None]
    share = name == "attainment" or name.endswith("_share")
    y = Axis(
        unit, "seconds" if name.endswith("_s") else "share" if share else "", wide,
        zero=not wide and not name.startswith("poa"),
    )  # fmt: skip
    x = Axis(against.replace("_", " "), log=_wide(levels))
    return Chart(f"{front}{name}", title, "", x, y, tuple(lines))


def _line(name: str, points: Sequence[tuple[float, float]], colour: int, stroke: Any) -> ChartLine:
    return ChartLine(
        name, [x for x, _ in points], [y for _, y in points], colour, stroke, marks=True
    )


def _wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) >= _WIDE


def _table(
    id_: str, title: str, rows: Sequence[Row], names: Sequence[str], against: str
) -> ReportTable:
    """Return rows in figures, with the paper's, and the relative error, where it has some."""
    printed = [name for name in names if any(_number(row["paper"].get(name)) for row in rows)]
    columns = [against.replace("_", " ")]
    spread = [name for name in names if any(name in row.get("ci95", {}) for row in rows)]
    for name in names:
        columns += [name, *(["± 95%"] if name in spread else [])]
        columns += ["paper", "error"] if name in printed else []
    cells = []
    for row in rows:
        line = [Cell(row.get("level_name") or row[against])]
        for name in names:
            form: Form = "seconds" if name.endswith("_s") else ""
            own = row[name] if _number(row.get(name)) else None
            line.append(Cell(own, form))
            if name in spread:
                low, high = row.get("ci95", {}).get(name, (None, None))
                line.append(Cell(None if low is None else (high - low) / 2, form))
            if name in printed:
                value = row["paper"].get(name)
                paper_value = value if _number(value) else None
                error = own / paper_value - 1.0 if own is not None and paper_value else None
                line += [Cell(paper_value, form), Cell(error, "signed")]
        cells.append(tuple(line))
    return ReportTable(id_, title, tuple(columns), tuple(cells))


def of_rows(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> PageVerdict:
    """Return how far an experiment's rows are from the paper's, figure by figure."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        for key, error in (row.get("relative_error") or {}).items():
            if isinstance(error, int | float):
                errors.setdefault(key, []).append(abs(float(error)))
    if not errors:
        return PageVerdict("good", f"{len(rows)} rows; the paper has no figures for them.")
    medians = {key: statistics.median(values) for key, values in errors.items()}
    reasons = tuple(
        f"{names.get(key, key)}: {median:.1%} from the paper's (median of {len(errors[key])} rows, "
        f"at most {max(errors[key]):.0%})."
        for key, median in medians.items()
    )
    close = sum(median <= 0.1 for median in medians.values())
    level: Literal["good", "fair", "bad"] = (
        "good" if close == len(medians) else "fair" if close else "bad"
    )
    text = f"{close} of {len(medians)} figures are within 10% of the paper's in the median."
    return PageVerdict(level, text, reasons)
