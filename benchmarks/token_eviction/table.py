"""Outcomes of all methods of a task at one budget, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.token_eviction.budget import Budget
from benchmarks.token_eviction.metrics import interval
from benchmarks.token_eviction.task import Outcome

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """One figure of an outcome, by row."""

    name: str
    of: Callable[[Outcome], Values]  # takes it from an outcome, shape (rows,)
    sign: int  # 1 where more is better, -1 where less is
    form: str  # how a mean and a difference are written


NLL = Figure("nats", lambda o: o.nll.mean(axis=1), -1, ".4f")
KL = Figure("KL", lambda o: o.kl.mean(axis=1), -1, ".4f")
MASS = Figure("mass", lambda o: o.mass.mean(axis=(1, 2, 3)), 1, ".3f")
RECALL = Figure("recall", lambda o: o.right.mean(axis=1).astype(np.float64), 1, ".3f")

TEXT, QUESTIONS = (NLL, KL, MASS), (RECALL, NLL, MASS)


@dataclass(frozen=True)
class Cell:
    """All methods on one task at one budget."""

    task: str
    budget: Budget
    limit: float  # bytes of it, for a row
    outcomes: dict[str, Outcome]  # by method; the names begin with `PIGOU` or `KVPRESS`
    # labels of the rows, by name, each of shape (rows,); empty for text.
    labels: dict[str, NDArray[np.int64]]

    @property
    def figures(self) -> tuple[Figure, ...]:
        """What it is judged by, the first above all."""
        return QUESTIONS if self.labels else TEXT


#: Before the names of each side's methods.
PIGOU, KVPRESS = "pigou: ", "kvpress: "
OURS, ORACLE, FULL = PIGOU + "pigou", PIGOU + "oracle", PIGOU + "full"
#: Behind a policy's name: its predictor was trained for the model by the benchmark.
TRAINED = " (trained for the model)"


def baselines(cell: Cell) -> list[str]:
    """Return what Pigou's own policy is compared with: all but itself, oracles and full caches.

    Methods above the budget are no baselines.
    """
    over = above(cell)
    kept = [n for n in cell.outcomes if "oracle" not in n and "full" not in n and n not in over]
    return [name for name in kept if not name.startswith(OURS)]


def above(cell: Cell, tolerance: float = 0.01) -> list[str]:
    """Return the methods that had more bytes than the budget, in the mean or at the peak."""
    most = cell.limit * (1 + tolerance)
    return [n for n, o in cell.outcomes.items() if max(o.mean_bytes, o.peak_bytes) > most]


def difference(cell: Cell, figure: Figure, one: str, other: str) -> tuple[float, float, float]:
    """Return by how much a method is better than another, with a paired 95% interval over rows."""
    gains = figure.sign * (figure.of(cell.outcomes[one]) - figure.of(cell.outcomes[other]))
    return float(gains.mean()), *interval(gains)


def best(cell: Cell, figure: Figure) -> str:
    """Return the baseline that is best in a figure."""
    return max(baselines(cell), key=lambda n: figure.sign * figure.of(cell.outcomes[n]).mean())


def closed(cell: Cell, figure: Figure, one: str = OURS) -> float:
    """Return which part of the gap between best baseline and oracle a method closes.

    Not a number where there is no gap.
    """
    top, ours, oracle = (
        float(figure.sign * figure.of(cell.outcomes[name]).mean())
        for name in (best(cell, figure), one, ORACLE)
    )
    return (ours - top) / (oracle - top) if oracle > top else float("nan")


def lines(cell: Cell) -> list[str]:
    """Return the table of a cell in Markdown, best first."""
    main = cell.figures[0]
    groups = {name: sorted(set(values.tolist())) for name, values in cell.labels.items()}
    titles = [f"{name} {value}" for name, values in groups.items() for value in values]
    heads = [_head(figure) for figure in cell.figures]
    names = sorted(
        cell.outcomes, key=lambda n: -main.sign * float(main.of(cell.outcomes[n]).mean())
    )
    table = [
        ["method", *heads, "mass p5", "bytes, mean", "peak", "beside", "lead", *titles],
        *[
            [
                name, *[_figure(cell, figure, name) for figure in cell.figures],
                f"{np.quantile(cell.outcomes[name].mass, 0.05):.3f}",
                *[f"{b / cell.limit:.3f}" for b in _bytes(cell.outcomes[name])],
                _lead(cell, name),
                *[
                    f"{RECALL.of(cell.outcomes[name])[values == value].mean():.2f}"
                    for values, value in _groups(cell)
                ],
            ]
            for name in names
        ],
    ]  # fmt: skip
    return [f"\n### {cell.task}, {cell.budget.share:.1%} of the full cache", "", *markdown(table)]


def verdict(cell: Cell) -> list[str]:
    """Return how Pigou's policy stands to every baseline and to the oracle."""
    if not baselines(cell):
        return []
    own = [name for name in (OURS, OURS + TRAINED) if name in cell.outcomes]
    return ["", *[line for name in own for line in _standing(cell, name)]]


def _standing(cell: Cell, one: str) -> list[str]:
    """Return how one of Pigou's methods stands, a line for each figure."""
    found = []
    for figure in cell.figures:
        behind = [n for n in baselines(cell) if difference(cell, figure, one, n)[2] < 0]
        top = best(cell, figure)
        by, low, high = difference(cell, figure, one, top)
        form = figure.form
        text = f"{one.removeprefix(PIGOU)}, {figure.name}: better than the best baseline ({top})"
        text += f" by {by:+{form}} [{low:+{form}}, {high:+{form}}]"
        if ORACLE in cell.outcomes:
            part = closed(cell, figure, one)
            text += ", no gap to the oracle" if math.isnan(part) else f", gap closed {part:.0%}"
        found.append(f"- {text}" + (f"; BEHIND {', '.join(behind)}" if behind else ""))
    return found


def document(cell: Cell) -> dict[str, Any]:
    """Return a cell as JSON values, figures by row."""
    return {
        "task": cell.task,
        "share": cell.budget.share,
        "entries": cell.budget.most,
        "limit_bytes": cell.limit,
        "labels": {name: values.tolist() for name, values in cell.labels.items()},
        "methods": {
            name: {
                **{f.name: f.of(outcome).tolist() for f in (NLL, KL, MASS, RECALL)},
                "mass_p5": float(np.quantile(outcome.mass, 0.05)),
                "mean_bytes": outcome.mean_bytes,
                "peak_bytes": outcome.peak_bytes,
                "side_bytes": outcome.side_bytes,
                "seconds": outcome.seconds,
            }
            for name, outcome in cell.outcomes.items()
        },
        "above_budget": above(cell),
    }


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows, the first of them heads, as a table."""
    head, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *rest]


def _head(figure: Figure) -> str:
    return {"nats": "perplexity | nats above full"}.get(figure.name, figure.name)


def _figure(cell: Cell, figure: Figure, name: str) -> str:
    """Write a mean with half its interval; the loss as perplexity and above the full cache's."""
    values = figure.of(cell.outcomes[name])
    if figure is not NLL:
        return f"{values.mean():{figure.form}} ±{_half(values):{figure.form}}"
    full = next((n for n in cell.outcomes if n.endswith("full")), None)
    if full is None:
        return f"{np.exp(values.mean()):.2f} | -"
    more = values - figure.of(cell.outcomes[full])
    return f"{np.exp(values.mean()):.2f} | {more.mean():+.4f} ±{_half(more):.4f}"


def _lead(cell: Cell, name: str) -> str:
    """Write by how much Pigou's policy is better in the first figure, with its interval."""
    if OURS not in cell.outcomes or name == OURS:
        return ""
    figure = cell.figures[0]
    by, low, high = difference(cell, figure, OURS, name)
    return f"{by:+{figure.form}} [{low:+{figure.form}}, {high:+{figure.form}}]"


def _half(values: Values) -> float:
    low, high = interval(values)
    return (high - low) / 2


def _bytes(outcome: Outcome) -> tuple[float, float, float]:
    return outcome.mean_bytes, outcome.peak_bytes, outcome.side_bytes


def _groups(cell: Cell) -> list[tuple[NDArray[np.int64], int]]:
    return [
        (values, value) for values in cell.labels.values() for value in sorted(set(values.tolist()))
    ]
