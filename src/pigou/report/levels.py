"""The page of an experiment: figures against concurrency, beside what others found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pigou.report.figure import Axis, Chart, Line
from pigou.report.page import Page, Section
from pigou.report.palette import LINES, STROKES
from pigou.report.table import Cell, Form, Table

Row = Mapping[str, Any]

#: Column -> title, and the axis' title. Others are drawn under their own name.
_KNOWN = {
    "ttft_p50_s": ("Time to first token, p50", "latency"),
    "ttft_p99_s": ("Time to first token, p99", "latency"),
    "itl_p50_s": ("Between tokens, p50", "latency"),
    "itl_p99_s": ("Between tokens, p99", "latency"),
    "tpot_p99_s": ("Time per token, p99", "latency"),
    "e2e_p99_s": ("End to end, p99", "latency"),
    "poa_legacy": ("Price of Anarchy, the paper's index", "ratio"),
    "poa": ("Price of Anarchy", "ratio"),
    "poa_whole": ("Price of Anarchy", "ratio"),
    "rps": ("Throughput", "requests per second"),
    "attainment": ("Attainment", "share of offered requests"),
}
#: Over so many times its least value, a figure is drawn by ratios.
_WIDE = 20.0


def page(
    rows: Sequence[Row], *, title: str, subtitle: str = "", against: str = "concurrency",
    paper: Sequence[Row] = (), figures: Sequence[str] = (),
) -> Page:  # fmt: skip
    """Return the page of rows of figures.

    Args:
        rows: one a level, with the level, numbers, and texts that tell kinds of rows apart
            (a policy, a fleet): each kind has a line of its own. A row may bring what others
            found for it, as `paper`: {figure: value}, or as `paper_FIGURE`.
        title: of the page.
        subtitle: of the page.
        against: name of the level.
        paper: what others found, rows of the same form, drawn in grey.
        figures: columns to draw; all numbers, where none are given.

    Raises:
        ValueError: there are no rows, or one has no level, or there is nothing to draw.
    """
    ours = [_flat(row) for row in rows]
    if not ours:
        raise ValueError("rows are empty: the experiment has no results; run it again")
    for row in ours:
        if not _number(row.get(against)):
            raise ValueError(f"a row has no number {against!r}: {dict(row)}")
    theirs = [*paper, *_theirs(ours, against)]
    names = tuple(figures) or _columns(ours, against)
    if not names:
        raise ValueError(f"rows have no numbers but {against!r}: there is nothing to draw")
    missing = [name for name in names if not any(_number(row.get(name)) for row in ours)]
    if missing:
        raise ValueError(f"figures are {list(names)}, but no row has {', '.join(missing)}")
    charts = tuple(_chart(name, ours, theirs, against) for name in names)
    return Page(
        title=title,
        subtitle=subtitle or f"{len(ours)} rows by {against}",
        sections=(
            Section("figures", "Figures", charts),
            Section("numbers", "Numbers", _tables(ours, theirs, names, against)),
        ),
    )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flat(row: Row) -> dict[str, Any]:
    """Return a row with what others found as `paper_FIGURE`."""
    found = dict(row)
    nested = found.pop("paper", None)
    if isinstance(nested, Mapping):
        found |= {f"paper_{key}": value for key, value in nested.items()}
    return found


def _theirs(rows: Sequence[Row], against: str) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        values = {
            key.removeprefix("paper_"): value
            for key, value in row.items() if key.startswith("paper_") and _number(value)
        }  # fmt: skip
        if values:
            found.append({against: row[against], **values})
    return [row for place, row in enumerate(found) if row not in found[:place]]


def _columns(rows: Sequence[Row], against: str) -> tuple[str, ...]:
    """Return the columns that are numbers and change, known ones first."""
    found = dict.fromkeys(
        key for row in rows for key, value in row.items()
        if _number(value) and key not in (against, "seed") and not key.startswith("paper_")
    )  # fmt: skip
    return tuple(sorted(found, key=lambda key: key not in _KNOWN))


def _kinds(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return rows by the texts that tell them apart."""
    texts = dict.fromkeys(
        key for row in rows for key, value in row.items() if isinstance(value, str)
    )
    telling = [key for key in texts if len({row.get(key) for row in rows}) > 1]
    found: dict[str, list[Row]] = {}
    for row in rows:
        name = ", ".join(str(row[key]) for key in telling if row.get(key)) or "ours"
        found.setdefault(name, []).append(row)
    return found


def _points(rows: Sequence[Row], name: str, against: str) -> tuple[list[float], list[float]]:
    pairs = sorted((row[against], row[name]) for row in rows if _number(row.get(name)))
    return [x for x, _ in pairs], [y for _, y in pairs]


def _chart(name: str, ours: Sequence[Row], theirs: Sequence[Row], against: str) -> Chart:
    lines = []
    if _points(theirs, name, against)[0]:
        points = _points(theirs, name, against)
        lines.append(Line("the paper", *points, -1, "dash", marks=True))
    for place, (kind, rows) in enumerate(_kinds(ours).items()):
        stroke = STROKES[place // LINES % len(STROKES)]
        lines.append(Line(kind, *_points(rows, name, against), place % LINES, stroke, marks=True))
    values = [value for line in lines for value in line.y if value is not None]
    levels = [value for line in lines for value in line.x if value is not None]
    title, unit = _KNOWN.get(name, (name, name))
    share = name in ("attainment", "goodput") or name.endswith("_share")
    y = Axis(
        unit, "seconds" if name.endswith("_s") else "share" if share else "", _wide(values),
        zero=not _wide(values) and "poa" not in name,
    )  # fmt: skip
    return Chart(f"{against}-{name}", title, "", Axis(against, log=_wide(levels)), y, tuple(lines))


def _wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) >= _WIDE


def _tables(
    ours: Sequence[Row], theirs: Sequence[Row], names: Sequence[str], against: str
) -> tuple[Table, ...]:
    """Return a table a kind of rows: ours, theirs, and the relative error."""
    known = {row[against]: row for row in theirs}
    found = []
    for place, (kind, rows) in enumerate(_kinds(ours).items()):
        columns, cells = [against], []
        beside = [name for name in names if any(_number(row.get(name)) for row in theirs)]
        for name in names:
            columns.append(name)
            if name in beside:
                columns += ["the paper", "error"]
        for row in sorted(rows, key=lambda row: row[against]):
            line = [Cell(row[against])]
            for name in names:
                form: Form = "seconds" if name.endswith("_s") else ""
                mine, other = row.get(name), known.get(row[against], {}).get(name)
                line.append(Cell(mine if _number(mine) else None, form))
                if name in beside:
                    error = mine / other - 1 if _number(mine) and other else None
                    line += [Cell(other, form), Cell(error, "signed")]
            cells.append(tuple(line))
        found.append(Table(f"rows-{place}", kind, tuple(columns), tuple(cells)))
    return tuple(found)
