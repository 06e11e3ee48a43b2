"""Cells of a table that several processes fill: each is run once, and appended to a file."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

Cell = dict[str, Any]
T = TypeVar("T")


def read_cells(out: Path, name: str) -> list[Cell]:
    """Return the cells of a table that are done, of all shares."""
    lines = [line for path in sorted(out.glob(f"{name}-*.jsonl")) for line in path.open()]
    return [json.loads(line) for line in lines]


def fill_cells(
    out: Path, name: str, share: str, cells: Sequence[T], is_done: Callable[[T], bool],
    run: Callable[[T], Cell],
) -> None:  # fmt: skip
    """Run the cells of a share that are not done, and append each to `NAME-SHARE.jsonl`.

    Args:
        out: folder of the files.
        share: `i/n` is every n-th cell from the i-th on, done or not: shares never overlap.
        is_done: whether a cell is to be skipped.
        run: returns the figures of a cell.
    """
    part, parts = (int(number) for number in share.split("/"))
    with (out / f"{name}-{part}.jsonl").open("a") as file:
        for cell in cells[part::parts]:
            if not is_done(cell):
                print(json.dumps(run(cell)), file=file, flush=True)
                gc.collect()
