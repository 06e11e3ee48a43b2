"""Figures of a part of a run: of the calls and gaps between two times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pigou.games.legacy_estimator import LegacyEstimator
from pigou.request import SECOND
from pigou.sim.call import Call, Outcome
from pigou.sim.result import summary
from pigou.sim.simulation import Simulation
from pigou.sim.streams import Gaps
from pigou.sim.virtual_clock import EPOCH, Phase

_SHARE = np.array([99.0])
#: Order among the clock's events of one moment: after those of the fleet.
_MARK = -90


@dataclass
class Marks:
    """Snapshots of the gaps between tokens at the ends of windows, taken while the run goes on.

    Attributes:
        at: seconds from the beginning, rising.
        taken: the gaps until then.
    """

    at: Sequence[float]
    taken: list[Gaps] = field(default_factory=list)

    def follow(self, simulation: Simulation) -> None:
        """Take a snapshot at each time; call it before the run."""
        for seconds in self.at:
            simulation.clock.at(
                at(seconds), Phase.TICK, _MARK, lambda _: self._take(simulation.fleet.gaps)
            )

    def between(self, first: int, second: int) -> Gaps:
        """Return the gaps between two of the times, by their index."""
        found, low, high = Gaps(), self.taken[first], self.taken[second]
        found.histogram = high.histogram - low.histogram
        found.sums = high.sums - low.sums
        return found

    def _take(self, gaps: Gaps) -> None:
        copy = Gaps()
        copy.histogram, copy.sums = gaps.histogram.copy(), gaps.sums.copy()
        self.taken.append(copy)


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a window, in seconds; a latency counts from the intention to send.

    Attributes:
        ttft_p99_s: of the requests that completed in the window.
        ttft_drained_p99_s: the same with those that completed after it.
        server_ttft_p99_s: from sending.
        wait_p99_s: from the intention to sending.
        e2e_mean_s: until the last token.
        itl_p99_s: between tokens.
        rps: completions a second in the window.
        poa_legacy: the paper's index of the last 200 completions, drained ones included.
        poa_window: the same without drained ones.
        inflight: requests that the fleet has, on average.
        requests: that completed.
        unsent: requests that were meant to be sent before the end and were not by then.
    """

    ttft_p99_s: float
    ttft_drained_p99_s: float
    server_ttft_p99_s: float
    wait_p99_s: float
    e2e_mean_s: float
    itl_p99_s: float
    rps: float
    poa_legacy: float
    poa_window: float
    inflight: float
    requests: int
    unsent: int


def at(seconds: float) -> int:
    """Return the time of the virtual clock so many seconds from the beginning."""
    return EPOCH + round(seconds * SECOND)


def measure(
    calls: Sequence[Call], begin: float, end: float, gaps: Gaps, workers: int, *,
    meant: bool = False,
) -> Measured | None:  # fmt: skip
    """Return the figures of the calls that completed in a window.

    Who starves is seen only by the completions: with few served, those that were meant to be
    sent in the window are the ones that did not wait.

    Args:
        calls: of the run.
        begin: of the window, in seconds from the beginning.
        end: of it.
        gaps: between tokens in it.
        workers: columns of the index: decode workers.
        meant: count only those that were also meant to be sent in it, as for a phase whose
            predecessor leaves requests behind.

    Returns:
        None where there is none.
    """
    low, high = at(begin), at(end)
    done = sorted(
        (each for each in calls if each.outcome is Outcome.DONE and each.last > low),
        key=lambda each: each.last,
    )
    since = low if meant else 0
    drained = [each for each in done if since <= each.intended < high]
    inside = [each for each in drained if each.last <= high]
    if not inside:
        return None
    busy = sum(min(each.last, high) - max(each.sent, low) for each in done if each.sent < high)
    return Measured(
        ttft_p99_s=_p99([each.first - each.intended for each in inside]),
        ttft_drained_p99_s=_p99([each.first - each.intended for each in drained]),
        server_ttft_p99_s=_p99([each.first - each.sent for each in inside]),
        wait_p99_s=_p99([each.sent - each.intended for each in inside]),
        e2e_mean_s=sum(each.last - each.intended for each in inside) / len(inside) / SECOND,
        itl_p99_s=float(gaps.percentiles(_SHARE)[0]),
        rps=sum(each.last <= high for each in done) / (end - begin),
        poa_legacy=index(drained, workers),
        poa_window=index(inside, workers),
        inflight=busy / (high - low),
        requests=len(inside),
        unsent=sum(each.intended < high and not 0 < each.sent <= high for each in calls),
    )


def index(done: Sequence[Call], workers: int) -> float:
    """Return the paper's index of the last 200 of some calls, which are in order of completion."""
    estimator = LegacyEstimator(workers)
    for each in done[-200:]:
        estimator.observe((each.last - each.intended) / SECOND)
    return estimator.poa()


def _p99(nanos: Sequence[int]) -> float:
    found = summary(np.array(nanos, dtype=np.int64))["p99"]
    assert found is not None
    return found
