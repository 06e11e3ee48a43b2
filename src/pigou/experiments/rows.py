"""Rows of results: means over seeds, the paper's figure beside them, and how far they differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pigou.experiments.paper import Figures
from pigou.experiments.window import Measured

#: Figures that the paper printed too.
COMPARED = ("ttft_p99_s", "itl_p99_s", "poa_legacy", "rps")

Row = dict[str, Any]


def row(
    experiment: str, users: int, runs: Sequence[Measured], seeds: Sequence[int],
    paper: Figures | None = None, **rest: Any,
) -> Row:  # fmt: skip
    """Return a row: each figure is the mean over the runs, as in the paper's Experiment 3.

    Args:
        experiment: its name.
        users: concurrency.
        runs: figures of each.
        seeds: of each.
        paper: its figures for the same.
        rest: further columns.
    """
    columns = [asdict(each) for each in runs]
    means = {name: statistics.fmean(each[name] for each in columns) for name in columns[0]}
    found: Row = {"experiment": experiment, "concurrency": users, **means, **rest}
    if len(runs) > 1:
        found["sd"] = {name: statistics.stdev(each[name] for each in columns) for name in COMPARED}
    found["runs"] = [{"seed": s, **c} for s, c in zip(seeds, columns, strict=True)]
    if paper is not None:
        found["paper"] = {name: getattr(paper, name) for name in (*COMPARED, "regime", "source")}
        found["relative_error"] = {
            name: found[name] / value - 1.0
            for name in COMPARED
            if (value := getattr(paper, name)) is not None
        }
    return found


def log_rmse(rows: Sequence[Mapping[str, Any]], name: str, least: int = 0, most: int = 10**9) -> (
    float | None
):  # fmt: skip
    """Return the root mean square of ln(ours / paper's) over rows of these levels; None if none."""
    logs = [
        math.log(each[name] / each["paper"][name])
        for each in rows
        if least <= each["concurrency"] <= most and each.get("paper", {}).get(name)
    ]
    return math.sqrt(statistics.fmean(x * x for x in logs)) if logs else None
