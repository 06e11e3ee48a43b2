"""Progress on stderr: the stages of a start, and a bar for long work."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.spinner import Spinner
from rich.table import Table

#: The last stage of every part.
READY = "ready"
_COMPILING = "compiling kernel"
#: Plain lines show every tenth compiled kernel.
_EVERY = 10
#: Seconds between two lines where there is no terminal.
_LINE_EVERY_S = 10.0


def wide_console(width: int = 100) -> Console:
    """Return a console of the terminal's width; of `width` columns where there is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


class WorkProgress(Progress):
    """A bar on a terminal; elsewhere a line each ten seconds.

    It has few refreshes: they take time from what is measured.
    """

    def __init__(self, *, counts: bool = False, line_every_s: float = _LINE_EVERY_S) -> None:
        """With `counts`, a task shows how many of its parts are done."""
        console = Console(stderr=True)
        text = TextColumn("{task.description}")
        columns: list[ProgressColumn] = [BarColumn(), text, TimeElapsedColumn()]
        if counts:
            columns.insert(1, MofNCompleteColumn())
        super().__init__(
            *columns, console=console, disable=not console.is_terminal, transient=True,
            refresh_per_second=2,
        )  # fmt: skip
        self._line_every_s = line_every_s
        self._over = threading.Event()

    def start(self) -> None:
        """Show progress from now on."""
        super().start()
        if self.disable:
            threading.Thread(target=self._print_lines, name="progress", daemon=True).start()

    def stop(self) -> None:
        """Show no more."""
        self._over.set()
        super().stop()

    def _print_lines(self) -> None:
        began = time.monotonic()
        while not self._over.wait(self._line_every_s):
            for task in self.tasks:
                share = f" ({task.percentage:.0f}%)" if task.total else ""
                took = time.monotonic() - began
                print(f"[{took:6.1f} s] {task.description}{share}", file=sys.stderr, flush=True)


class StageProgress:
    """Shows the startup stage of each part of the fleet; a context manager.

    `report` may be called before and after, too.
    """

    def __init__(self, console: Console | None = None) -> None:
        """Nothing is shown yet; by default, stderr is written to."""
        self._console = console or Console(stderr=True, highlight=False)
        self._began = time.monotonic()
        self._stages: dict[str, str] = {}
        self._live: Live | None = None
        self._compiled: dict[str, int] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                self._table(), console=self._console, transient=True, refresh_per_second=8
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Show no more."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def report(self, part: str, stage: str) -> None:
        """A part came to another stage."""
        self._stages[part] = stage
        if self._live is not None:
            self._live.update(self._table())
        elif not self._console.is_terminal and self._worth_a_line(part, stage):
            took = time.monotonic() - self._began
            print(f"[{took:6.1f} s] {part}: {stage}", file=sys.stderr, flush=True)

    def _worth_a_line(self, part: str, stage: str) -> bool:
        if _COMPILING not in stage:
            return True
        self._compiled[part] = self._compiled.get(part, 0) + 1
        return self._compiled[part] % _EVERY == 1

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for part, stage in self._stages.items():
            mark = "[green]✓[/]" if stage == READY else Spinner("dots")
            table.add_row(mark, part, f"[dim]{stage}[/]")
        return table
