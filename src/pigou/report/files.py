"""Writes and reads reports: a folder with the page, its pictures, and what they show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pigou.report.page import Page, html
from pigou.report.record import Record

PAGE, DATA = "index.html", "report.json"


class ReportError(Exception):
    """A report cannot be made, or read; the message says why, and what to do."""


def prepare(folder: str | Path, option: str = "--report") -> Path:
    """Make the folder of a report, before there is anything to put there.

    Raises:
        ReportError: it cannot be made, or is a file.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(
            f"{option} is {str(folder)!r}, which cannot be made a folder: {error}; name another"
        ) from error
    return path


def write(
    page: Page, folder: Path, data: Any = None, each: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Write a page, a picture of each of its figures, and `data` as `report.json`.

    Pictures of the page that was there before are removed.

    Args:
        page: to write.
        folder: that exists.
        data: what the page shows; None writes none.
        each: told the name of a file before it is made.

    Raises:
        ReportError: a file cannot be written.
    """
    from pigou.report.drawing import png  # matplotlib takes half a second to import

    written = [folder / PAGE]
    try:
        _clear(folder)
        each(PAGE)
        written[0].write_text(html(page), encoding="utf-8")
        if data is not None:
            written.append(folder / DATA)
            written[-1].write_bytes(msgspec.json.encode(data) + b"\n")
        for figure in page.figures:
            if not figure.empty:
                written.append(folder / f"{figure.id}.png")
                each(written[-1].name)
                png(figure, written[-1])
    except OSError as error:
        raise ReportError(f"the report cannot be written: {error}") from error
    return written


def _clear(folder: Path) -> None:
    """Remove the pictures whose figures an earlier page in the folder has, and no others."""
    page = folder / PAGE
    if not page.is_file():
        return
    before = page.read_text(encoding="utf-8", errors="replace")
    for picture in folder.glob("*.png"):
        if f'id="{picture.stem}"' in before:
            picture.unlink()


def load(name: str) -> Any:
    """Read what a report, or a JSON file, has: a run's record, its figures, or levels' rows.

    Args:
        name: a folder that has report.json or results.json, or a file.

    Raises:
        ReportError: there is no such thing, or it is not JSON.
    """
    path = Path(name)
    if path.is_dir():
        found = [path / each for each in (DATA, "results.json") if (path / each).is_file()]
        if not found:
            raise ReportError(
                f"{name} has neither report.json nor results.json; name a folder that "
                "`pigou simulate --report` or `pigou experiment --out` wrote"
            )
        path = found[0]
    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{name} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise ReportError(f"{path} is not JSON: {error}; name what pigou wrote") from error


def as_record(name: str, found: Any) -> Record:
    """Return a run from what `load` read.

    Raises:
        ReportError: it is no run.
    """
    if isinstance(found, dict) and found.get("kind") == "pigou simulation":
        try:
            return msgspec.convert(found, Record)
        except msgspec.ValidationError as error:
            raise ReportError(f"{name} is damaged, or of another version: {error}") from error
    if isinstance(found, dict) and isinstance(found.get("ttft_s"), dict) and "offered" in found:
        return Record(
            pigou="", title=Path(name).stem, config={}, figures=found, outcomes=[], curves={},
            attainment=None, stages=[], load=[], course=None, samples=None,
        )  # fmt: skip
    raise ReportError(
        f"{name} is neither a report nor figures of `pigou simulate --json`; name one of these"
    )
