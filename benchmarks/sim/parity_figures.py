"""Figures of both sides of `benchmarks.sim.parity`, and their ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from pigou.request import SECOND
from pigou.sim.result import SimulationResult, summary

#: How near the two sides should be.
NEAR = 0.15
STATISTICS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True)
class Side:
    """Figures of one side: milliseconds, and tokens a second."""

    ttft: dict[str, float]
    itl: dict[str, float]
    throughput: float

    def figures(self) -> dict[str, float]:
        """Return all of them by name."""
        both = {"ttft": self.ttft, "itl": self.itl}
        named = {f"{name} {each}": both[name][each] for name in both for each in STATISTICS}
        return named | {"tokens/s": self.throughput}


#: Live, and simulated.
Pair: TypeAlias = tuple[Side, Side]


def of_simulation(result: SimulationResult, count: int) -> Side:
    """Return the figures of a simulation's last `count` calls."""
    calls = sorted(result.done, key=lambda call: call.intended_ns)[-count:]
    ttft = np.array([call.first_token_ns - call.intended_ns for call in calls])
    seconds = (max(c.last_token_ns for c in calls) - min(c.intended_ns for c in calls)) / SECOND
    itl = {"mean": result.itl.mean()}
    values = result.itl.percentiles(np.array([50.0, 90.0, 99.0])).tolist()
    itl |= dict(zip(STATISTICS[1:], values, strict=True))
    return Side(
        {name: 1e3 * (value or 0.0) for name, value in summary(ttft).items()},
        {name: 1e3 * value for name, value in itl.items()},
        sum(call.output_tokens for call in calls) / seconds,
    )


def of_bench(load: dict[str, Any]) -> Side:
    """Return the figures of `pigou bench --json`."""
    assert load["failed"] == 0, load["failures"]
    return Side(load["ttft_ms"], load["itl_ms"], load["output_tokens_per_second"])


def compare(name: str, live: Side, simulated: Side) -> None:
    """Print both sides and their ratios."""
    print(f"{name:<16}{'live':>10}{'simulated':>11}{'ratio':>7}")
    theirs = live.figures()
    for each, ours in simulated.figures().items():
        show(each, theirs[each], ours, ours / theirs[each])


def compare_rounds(name: str, pairs: Sequence[Pair]) -> None:
    """Print medians over the rounds: of both sides, and of the ratios, with their range."""
    print(f"{name:<16}{'live':>10}{'simulated':>11}{'ratio':>7}  medians of {len(pairs)} rounds")
    for each in pairs[0][0].figures():
        live, ours = np.array([[side.figures()[each] for side in pair] for pair in pairs]).T
        ratios = ours / live
        reach = f"  ({ratios.min():.2f} to {ratios.max():.2f})"
        middle = [float(np.median(one)) for one in (live, ours, ratios)]
        show(each, middle[0], middle[1], middle[2], reach)


def mean(sides: Sequence[Side]) -> Side:
    """Return the means of all figures."""
    ttft, itl = (
        {name: float(np.mean([part[name] for part in parts])) for name in STATISTICS}
        for parts in ([side.ttft for side in sides], [side.itl for side in sides])
    )
    return Side(ttft, itl, float(np.mean([side.throughput for side in sides])))


def show(name: str, live: float, simulated: float, ratio: float, more: str = "") -> None:
    """Print a figure of both sides, with a star where they differ by more than 15%."""
    star = "" if abs(ratio - 1.0) <= NEAR else " *"
    print(f"{name:<16}{live:>10.2f}{simulated:>11.2f}{ratio:>7.3f}{star}{more}", flush=True)
