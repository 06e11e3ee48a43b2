"""Progress on stderr: the stages of a start."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

#: The last stage of every part.
READY = "ready"
_COMPILING = "compiling kernel"
#: Of the kernels that are compiled, plain lines show one in so many.
_EVERY = 10


class StageProgress:
    """Shows what each part of the fleet does until it is ready; a context manager.

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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
