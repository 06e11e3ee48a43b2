"""The least memory at which a policy keeps the full cache's perplexity, by bisection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.token_pd.paper_tables import MIB
from benchmarks.token_pd.run import Figures

#: How much worse than the full cache's a perplexity may be.
TOLERANCE = 0.005
HEAD = ["streams", "policy", "least good MiB", "next worse MiB", "perplexity", "exact",
        "peak / full", "peak / FIFO", "peak / H2O"]  # fmt: skip


@dataclass(frozen=True)
class Iso:
    """The smallest budget found good, and its run; None where no budget tried was."""

    policy: str
    good: Figures | None  # the run of the smallest budget within the tolerance
    # the run of the largest budget below it that was not; None where all were good.
    bad: Figures | None
    runs: int


def least_budget(
    policy: str,
    run: Callable[[int], Figures],
    full: float,
    low: int,
    high: int,
    *,
    rounds: int = 6,
    tolerance: float = TOLERANCE,
) -> Iso:
    """Bisect the budget, by ratios, between two numbers of blocks.

    Args:
        run: runs the policy on a number of blocks.
        full: perplexity of the full cache.
        low: blocks; tried only if everything above was good.
        high: blocks with which nothing is given up.
        rounds: most runs.
        tolerance: how much worse than `full` a perplexity may be, as a share.
    """
    good: Figures | None = None
    bad: Figures | None = None
    for number in range(rounds):
        middle = round((low * high) ** 0.5)
        if middle in (low, high):
            return Iso(policy, good, bad, number)
        figures = run(middle)
        if figures.perplexity <= full * (1 + tolerance):
            good, high = figures, middle
        else:
            bad, low = figures, middle
    return Iso(policy, good, bad, rounds)


def compared(full: Figures, found: Sequence[Iso]) -> list[list[str]]:
    """Return the rows of a table: least peaks against the full cache's, FIFO's and H2O's."""
    peaks = {each.policy: each.good.peak_bytes for each in found if each.good}
    quality = [f"{full.perplexity:.3f}", f"{full.exact:.1%}"]
    rows = [[str(full.streams), "full", _mib(full), "-", *quality, "-", "-", "-"]]
    for each in found:
        if each.good is None:
            rows.append([str(full.streams), each.policy, "none was good", *["-"] * 6])
            continue
        peak = each.good.peak_bytes
        against = [
            f"{peak / peaks[other] - 1:+.0%}" if other in peaks else "-"
            for other in ("fifo", "h2o")
        ]
        rows.append([
            str(full.streams), each.policy, _mib(each.good), _mib(each.bad) if each.bad else "-",
            f"{each.good.perplexity:.3f}", f"{each.good.exact:.1%}",
            f"{peak / full.peak_bytes - 1:+.0%}", *against,
        ])  # fmt: skip
    return rows


def _mib(figures: Figures) -> str:
    return f"{figures.peak_bytes / MIB:.1f}"
