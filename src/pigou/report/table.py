"""Tables: figures under headings, each as text to read and as the exact value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pigou.report.figure import duration, significant

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


@dataclass(frozen=True, slots=True)
class Cell:
    """One value.

    Attributes:
        value: exact; None where there is none.
        form: how it reads.
        tint: 0 to 1, how much it is coloured; None for not at all.
    """

    value: Value
    form: Form = ""
    tint: float | None = None

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
class Table:
    """Rows under headings.

    Attributes:
        id: unique on its page.
        title: what it shows.
        columns: headings; the first column names the rows.
        rows: cells, (rows, columns).
        note: how to read it.
        folded: whether it is shown only when asked for.
    """

    id: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    folded: bool = False

    def compact(self) -> Table:
        """Return the table without columns that no row has a value in; the first one stays."""
        kept = [
            place
            for place in range(len(self.columns))
            if not place or not self.rows or any(cells[place].filled for cells in self.rows)
        ]
        if len(kept) == len(self.columns):
            return self
        return replace(
            self,
            columns=tuple(self.columns[place] for place in kept),
            rows=tuple(tuple(cells[place] for place in kept) for cells in self.rows),
        )

    @property
    def figures(self) -> tuple[bool, ...]:
        """Whether there are figures under a heading, (columns,)."""
        return tuple(
            any(cells[place].number for cells in self.rows) for place in range(len(self.columns))
        )


def row(name: str, values: Sequence[Value], form: Form = "") -> tuple[Cell, ...]:
    """Return a row whose values read alike."""
    return (Cell(name), *(Cell(value, form) for value in values))
