"""Pages: sections of figures and tables, as one HTML file that fetches nothing."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import jinja2
import msgspec
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from pigou import __version__
from pigou.config import ConfigError
from pigou.report.figure import COLOURS, Axis, Bars, Chart, Figure, Heat, duration, significant
from pigou.report.figure_plotly import drawing
from pigou.report.run_record import RunRecord, Samples
from pigou.small_file import read_bytes
from pigou.wire.errors import DECODING_ERRORS

#: Share of offered requests that may fail before a run is bad, not only fair.
MAX_FAILED_SHARE = 0.01
#: A queue that grew by this factor from the second to the last quarter of the run.
QUEUE_GROWTH = 2.0
#: Share of the time to first token (P99) that may be waiting at the client.
MAX_CLIENT_SHARE = 0.5
#: Preemptions for each served request beyond which KV memory counts as short.
MAX_PREEMPTIONS = 0.05
#: Difference of busy shares of workers of one role beyond which they count as uneven.
MAX_UNEVEN = 0.3
#: Price of Anarchy of routing beyond which it is named, where its interval is above 1, too.
MAX_ANARCHY = 1.1
#: Relative difference below which two figures count as equal.
TIE = 0.01

#: Figures that decide between runs: key, statistic, name, and whether more is better.
_JUDGED = (
    ("e2e_s", "mean", "mean time", False),
    ("ttft_s", "p99", "time to first token, p99", False),
    ("itl_s", "p99", "time between tokens, p99", False),
    ("throughput_rps", "", "throughput", True),
)
Value = str | int | float | None
#: How a column's numbers read: plain, seconds in a fitting unit, percent, a factor, or a
#: difference in percent.
Form = Literal["", "seconds", "share", "ratio", "signed"]
_FORMS: dict[Form, Callable[[float], str]] = {
    "seconds": lambda value: duration(value, keep=True),
    "share": lambda value: f"{value:.1%}",
    "ratio": lambda value: f"{significant(value, 3, keep=True)} ×",
    "signed": lambda value: f"{value:+.1%}",
}
#: Most rows; of longer lines, points at even distances are shown.
ROWS = 40
_EVEN = "Points at even distances; all of them are in report.json."
#: Bytes of a page or a record that is read.
_MAX_PAGE = 1 << 30
PAGE, DATA = "index.html", "report.json"


@dataclass(frozen=True, slots=True)
class PageVerdict:
    """The conclusion of a page."""

    level: Literal["good", "fair", "bad"]  # `good`, `fair` (to be looked at) or `bad`
    text: str
    reasons: tuple[str, ...] = ()  # one a line, the weightiest first


def of_run(run: RunRecord) -> PageVerdict:
    """Return the verdict of one run, by the thresholds of this file."""
    figures = run.figures
    total, served = int(figures["offered"]), int(figures["completed"])
    if not served:
        return PageVerdict("bad", "Nothing was served.")
    bad, fair = _lost_requests(figures), _weaknesses(run)
    if run.samples is not None and (growth := _queue_growth(run.samples)) >= QUEUE_GROWTH:
        bad.append(
            f"The fleet did not keep up: {growth:.1f} times as many requests waited at the end "
            "as earlier. More workers, or a lower rate, are needed."
        )
    ttft = figures["ttft_s"]["p99"]
    first = "" if ttft is None else f" 99% of first tokens came within {duration(ttft)}."
    if bad:
        return PageVerdict("bad", f"{served:,} of {total:,} requests were served.", (*bad, *fair))
    if fair:
        count = "One thing needs" if len(fair) == 1 else f"{len(fair)} things need"
        return PageVerdict("fair", f"All requests were served; {count} a look.{first}", tuple(fair))
    return PageVerdict("good", f"The fleet kept up: all {served:,} requests were served.{first}")


def _lost_requests(figures: Mapping[str, Any]) -> list[str]:
    total = int(figures["offered"])
    lost = [
        (name, int(figures.get(key) or 0))
        for key, name in (("failed", "failed"), ("unfinished", "were unfinished at the end"))
    ]
    return [
        f"{count / total:.1%} of offered requests {name}."
        for name, count in lost
        if count > MAX_FAILED_SHARE * total
    ]


def _weaknesses(run: RunRecord) -> list[str]:
    figures, weak = run.figures, []
    served = int(figures["completed"])
    failed = int(figures.get("failed") or 0) + int(figures.get("unfinished") or 0)
    if 0 < failed <= MAX_FAILED_SHARE * figures["offered"]:
        weak.append(f"{failed:,} requests failed, or were unfinished at the end.")
    wait, ttft = figures["client_wait_s"]["p99"], figures["ttft_s"]["p99"]
    if wait and ttft and wait > MAX_CLIENT_SHARE * ttft:
        weak.append(
            f"The client is the bottleneck: requests waited {duration(wait)} (p99) for a "
            "connection, and the fleet does not see that."
        )
    if int(figures.get("preemptions") or 0) > MAX_PREEMPTIONS * served:
        weak.append(
            f"KV memory is short: {figures['preemptions']:,} preemptions. More blocks, fewer "
            "sequences at once, or a host tier would help."
        )
    weak += _uneven(figures.get("workers") or ())
    poa = figures.get("poa") or {}
    low, high = (poa.get("interval") or {}).get("routing") or (0.0, 0.0)
    if low > 1.0 and poa["routing"] > MAX_ANARCHY:
        weak.append(
            f"Routing costs {poa['routing'] - 1:.0%} over the best assignment (Price of Anarchy, "
            f"90% interval {low - 1:.0%} to {high - 1:.0%})."
        )
    return weak


def _uneven(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    roles: dict[str, list[tuple[float, str]]] = {}
    for worker in workers:
        if isinstance(worker.get("busy"), int | float):
            role = str(worker.get("role", ""))
            roles.setdefault(role, []).append((float(worker["busy"]), str(worker.get("id", ""))))
    uneven = []
    for role, shares in roles.items():
        (low, idle), (high, busy) = min(shares), max(shares)
        if high - low > MAX_UNEVEN:
            uneven.append(
                f"Load is uneven among {role or 'all'} workers: {busy} computes {high:.0%} of the "
                f"time, {idle} {low:.0%}."
            )
    return uneven


def _queue_growth(samples: Samples) -> float:
    """Return waiting requests in the last quarter over those in the second; 0 where few wait."""
    columns = [samples.fleet[name] for name in ("queued", "waiting") if name in samples.fleet]
    waiting = [sum(value or 0.0 for value in sample) for sample in zip(*columns, strict=True)]
    quarter = len(waiting) // 4
    if not quarter:
        return 0.0
    early = statistics.fmean(waiting[quarter : 2 * quarter])
    late = statistics.fmean(waiting[-quarter:])
    return late / max(early, 1.0) if late > 1.0 else 0.0


def of_runs(runs: Sequence[RunRecord], labels: Sequence[str]) -> PageVerdict:
    """Return which of several runs is best, figure by figure, and by how much."""
    winners: list[str] = []
    reasons: list[str] = []
    for key, part, name, more in _JUDGED:
        values = [_figure(run.figures.get(key), part) for run in runs]
        known = [(value, label) for value, label in zip(values, labels, strict=True) if value]
        if len(known) < 2:
            continue
        ordered = sorted(known, key=lambda pair: pair[0], reverse=more)
        (best, winner), (second, other) = ordered[0], ordered[1]
        gap = abs(second / best - 1.0)
        shown = f"{best:.3g}/s" if more else duration(best)
        if gap < TIE:
            reasons.append(f"{name}: {winner} and {other} are equal ({shown}).")
            continue
        winners.append(winner)
        reasons.append(f"{name}: {winner}, {shown}; next is {other}, {gap:.0%} behind.")
    lossy = [
        label for run, label in zip(runs, labels, strict=True) if _lost_requests(run.figures)
    ]  # fmt: skip
    reasons += [f"{label} lost requests; its latencies are of those served." for label in lossy]
    level: Literal["good", "fair"] = "fair" if lossy or len(set(winners)) > 1 else "good"
    if not winners:
        return PageVerdict("fair", "No run is ahead in any figure.", tuple(reasons))
    if len(set(winners)) == 1:
        return PageVerdict(
            level, f"{winners[0]} is best, or equal, in every figure.", tuple(reasons)
        )
    return PageVerdict(level, "No run is best in everything.", tuple(reasons))


def _figure(value: Any, part: str) -> float | None:
    if part:
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and value > 0 else None


@dataclass(frozen=True, slots=True)
class Cell:
    """One value."""

    value: Value  # exact; None where there is none
    form: Form = ""
    tint: float | None = None  # 0 to 1, how much it is coloured; None for not at all

    @property
    def number(self) -> bool:
        """Whether it is a figure."""
        return isinstance(self.value, int | float)

    @property
    def filled(self) -> bool:
        """Whether it has a value: a finite figure, or a text."""
        if isinstance(self.value, str):
            return self.value not in ("", "–")
        return self.value is not None and math.isfinite(self.value)

    @property
    def text(self) -> str:
        """How it reads."""
        value = self.value
        if isinstance(value, str):
            return value
        if value is None or not math.isfinite(value):
            return "–"
        if self.form:
            return _FORMS[self.form](value)
        return f"{value:,}" if isinstance(value, int) else significant(value, keep=True)

    @property
    def exact(self) -> str:
        """The value, to the last digit."""
        return repr(self.value) if self.number else ""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Rows under headings."""

    id: str  # unique on its page
    title: str
    columns: tuple[str, ...]  # headings; the first column names the rows
    rows: tuple[tuple[Cell, ...], ...]  # cells, (rows, columns)
    note: str = ""
    folded: bool = False  # whether it is shown only when asked for

    def compact(self) -> ReportTable:
        """Return the table without columns that no row has a value in; the first one stays."""
        filled = [
            column
            for column in range(len(self.columns))
            if not column or not self.rows or any(cells[column].filled for cells in self.rows)
        ]
        if len(filled) == len(self.columns):
            return self
        return replace(
            self,
            columns=tuple(self.columns[column] for column in filled),
            rows=tuple(tuple(cells[column] for column in filled) for cells in self.rows),
        )

    @property
    def figures(self) -> tuple[bool, ...]:
        """Whether there are figures under a heading, (columns,)."""
        return tuple(
            any(cells[column].number for cells in self.rows) for column in range(len(self.columns))
        )


def row(name: str, values: Sequence[Value], form: Form = "") -> tuple[Cell, ...]:
    """Return a row whose values read alike."""
    return (Cell(name), *(Cell(value, form) for value in values))


def numbers(figure: Figure) -> ReportTable:
    """Return the numbers of a figure, folded away; long ones are thinned out, with a note."""
    if isinstance(figure, Bars):
        columns = ("", *(name for name, _ in figure.parts))
        rows = tuple(
            (Cell(name), *(Cell(values[k], figure.x.unit) for _, values in figure.parts))
            for k, name in enumerate(figure.rows)
        )
        return _table(figure, columns, rows, "")
    return _of_chart(figure) if isinstance(figure, Chart) else _of_heat(figure)


def _of_chart(chart: Chart) -> ReportTable:
    lines = chart.lines
    shared = all(list(line.x) == list(lines[0].x) for line in lines)
    if shared and lines:
        points = _shown_points(len(lines[0].x))
        rows = tuple(
            (_cell(lines[0].x[k], chart.x), *(_cell(line.y[k], chart.y) for line in lines))
            for k in points
        )
        columns = (chart.x.title, *(line.name for line in lines))
        return _table(chart, columns, rows, _EVEN if len(lines[0].x) > ROWS else "")
    rows = tuple(
        (Cell(line.name), _cell(line.x[k], chart.x), _cell(line.y[k], chart.y))
        for line in lines
        for k in _shown_points(len(line.x), max(4, ROWS // len(lines)))
    )
    total = sum(len(line.x) for line in lines)
    return _table(
        chart, ("", chart.x.title, chart.y.title), rows, "" if len(rows) == total else _EVEN
    )


def _of_heat(heat: Heat) -> ReportTable:
    rows = []
    for name, values in zip(heat.rows, heat.z, strict=True):
        known = [value for value in values if value is not None]
        figures = (min(known), sum(known) / len(known), max(known)) if known else (None,) * 3
        rows.append((Cell(name), *(Cell(value, heat.unit.unit) for value in figures)))
    note = "Over the samples; all of them are in report.json."
    return _table(heat, ("", "least", "mean", "most"), tuple(rows), note)


def _shown_points(count: int, max_points: int = ROWS) -> Sequence[int]:
    if count <= max_points:
        return range(count)
    return sorted({round(k * (count - 1) / (max_points - 1)) for k in range(max_points)})


def _cell(value: float | None, axis: Axis) -> Cell:
    for tick, label in axis.ticks:
        if value == tick:
            return Cell(label)
    return Cell(value, axis.unit)


def _table(
    figure: Figure, columns: tuple[str, ...], rows: tuple[tuple[Cell, ...], ...], note: str
) -> ReportTable:
    return ReportTable(
        f"{figure.id}-numbers", f"Numbers: {figure.title}", columns, rows, note, True
    )


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure at the top of a page."""

    label: str
    cell: Cell
    more: str = ""  # a second line, "" for none


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page."""

    id: str  # unique on its page
    title: str
    items: tuple[Figure | ReportTable, ...]  # figures and tables, from top to bottom
    note: str = ""  # under the heading


@dataclass(frozen=True, slots=True)
class ReportPage:
    """A page."""

    title: str  # heading, and title of the window
    subtitle: str
    sections: tuple[Section, ...]
    tiles: tuple[Tile, ...] = ()
    notices: tuple[str, ...] = field(default=())  # warnings, such as that nothing was served
    verdict: PageVerdict | None = None  # shown above all else; None where there is none

    @property
    def figures(self) -> list[Figure]:
        """All figures, from top to bottom."""
        return [
            item
            for section in self.sections
            for item in section.items
            if not isinstance(item, ReportTable)
        ]


def html(page: ReportPage) -> str:
    """Return a page as a file: styles, scripts, Plotly and data are all in it."""
    text = _template().render(
        page=page,
        is_table=lambda item: isinstance(item, ReportTable),
        compact=lambda table: table.compact(),
        numbers=numbers,
        style=Markup(_style()),
        data=Markup(_data(page.figures)),
        plotly=Markup(get_plotlyjs()),
        script=Markup(_text("page.js")),
    )
    return f"{text}\n"


def _data(figures: Sequence[Figure]) -> str:
    drawings = [drawing(figure) for figure in figures if not figure.empty]
    text = json.dumps(
        {"figures": drawings, "colours": COLOURS}, separators=(",", ":"), allow_nan=False
    )
    return text.replace("</", "<\\/")


def _style() -> str:
    light, dark = (
        ";".join(f"--{name}:{value}" for name, value in COLOURS[theme].items())
        for theme in ("light", "dark")
    )
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n{_text('page.css')}"
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_text("page.html"))


def _text(name: str) -> str:
    return files("pigou.report").joinpath(name).read_text(encoding="utf-8")


def prepare(folder: str | Path, option: str = "--report") -> Path:
    """Make the folder of a report, before there is anything to put there.

    Raises:
        ConfigError: it cannot be made, or is a file.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option} is {str(folder)!r}, which cannot be made a folder: {error}; name another"
        ) from error
    return path


def write(
    page: ReportPage,
    folder: Path,
    data: Any = None,
    on_file: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Write a page, a picture of each of its figures, and `data` as `report.json`.

    Pictures of the page that was there before are removed.

    Args:
        data: figures of the page, for `report.json`; None writes none.
        on_file: called with the name of a file before it is made.

    Raises:
        ConfigError: a file cannot be written.
    """
    from pigou.report.figure_png import png  # matplotlib takes half a second to import

    written = [folder / PAGE]
    try:
        _clear(folder)
        on_file(PAGE)
        written[0].write_text(html(page), encoding="utf-8")
        if data is not None:
            written.append(folder / DATA)
            written[-1].write_bytes(msgspec.json.encode(data) + b"\n")
        for figure in page.figures:
            if not figure.empty:
                written.append(folder / f"{figure.id}.png")
                on_file(written[-1].name)
                png(figure, written[-1])
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}") from error
    return written


def _clear(folder: Path) -> None:
    page = folder / PAGE
    if not page.is_file():
        return
    before = read_bytes(page, _MAX_PAGE).decode("utf-8", "replace")
    for picture in folder.glob("*.png"):
        if f'id="{picture.stem}"' in before:
            picture.unlink()


def load(name: str) -> Any:
    """Read a report or a JSON file: a run's record, its figures, or levels' rows.

    Raises:
        ConfigError: there is no such thing, or it is not JSON.
    """
    path = Path(name)
    if path.is_dir():
        paths = [path / file for file in (DATA, "results.json") if (path / file).is_file()]
        if not paths:
            raise ConfigError(
                f"{name} has neither report.json nor results.json; name a folder that "
                "`pigou simulate --report` or `pigou experiment --out` wrote"
            )
        path = paths[0]
    try:
        return msgspec.json.decode(read_bytes(path, _MAX_PAGE))
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    except DECODING_ERRORS as error:
        raise ConfigError(f"{path} is not JSON: {error}; name what pigou wrote") from error


def as_record(name: str, document: Any) -> RunRecord:
    """Convert a loaded document to a run.

    Raises:
        ConfigError: it is no run.
    """
    if isinstance(document, dict) and document.get("kind") == "pigou simulation":
        try:
            return msgspec.convert(document, RunRecord)
        except msgspec.ValidationError as error:
            by = document.get("pigou")
            raise ConfigError(
                f"{name} is damaged, or of another version: it was written by Pigou {by}, and is "
                f"read by {__version__}: {error}; make it again"
            ) from error
    if (
        isinstance(document, dict)
        and isinstance(document.get("ttft_s"), dict)
        and "offered" in document
    ):
        return RunRecord(
            pigou="", title=Path(name).stem, config={}, figures=document, outcomes=[], curves={},
            attainment=None, stages=[], load=[], course=None, samples=None,
        )  # fmt: skip
    raise ConfigError(
        f"{name} is neither a report nor figures of `pigou simulate --json`; name one of these"
    )
