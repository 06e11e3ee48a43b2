"""Figures of a window: of the requests and gaps between two times of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pigou.games.price_of_anarchy import legacy_index
from pigou.request import SECOND
from pigou.sim.request_run import RequestRun, RunOutcome
from pigou.sim.result import summary
from pigou.sim.simulation import Simulation
from pigou.sim.streams import ITLHistogram
from pigou.sim.virtual_clock import EPOCH, Phase

_SHARE = np.array([99.0])
#: Order among the clock's events of one moment: after those of the fleet.
_MARK = -90


@dataclass
class Marks:
    """Snapshots of the gaps between tokens at the ends of windows, taken while the run goes on."""

    at: Sequence[float]  # seconds from the beginning, rising
    taken: list[ITLHistogram] = field(default_factory=list)  # the gaps until then

    def follow(self, simulation: Simulation) -> None:
        """Take a snapshot at each time; call it before the run."""
        for seconds in self.at:
            simulation.clock.at(
                clock_ns(seconds), Phase.TICK, _MARK, lambda _: self._take(simulation.fleet.itl)
            )

    def between(self, first: int, second: int) -> ITLHistogram:
        """Return the gaps between two of the times, by their index."""
        return _difference(self.taken[first], self.taken[second])

    def _take(self, gaps: ITLHistogram) -> None:
        self.taken.append(copy_of(gaps))


def copy_of(gaps: ITLHistogram) -> ITLHistogram:
    """Return the gaps until now, which further ones do not change."""
    copy = ITLHistogram()
    copy.histogram, copy.sums = gaps.histogram.copy(), gaps.sums.copy()
    return copy


def _difference(low: ITLHistogram, high: ITLHistogram) -> ITLHistogram:
    difference = ITLHistogram()
    difference.histogram = high.histogram - low.histogram
    difference.sums = high.sums - low.sums
    return difference


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """Figures of a window, in seconds; a latency counts from the intention to send."""

    ttft_p99_s: float
    ttft_drained_p99_s: float  # the same with those that completed after it
    server_ttft_p99_s: float
    wait_p99_s: float
    e2e_mean_s: float  # until the last token
    itl_p99_s: float  # between tokens
    rps: float  # completions a second in the window
    poa_legacy: float  # the paper's index of the last 200 completions, drained ones included
    poa_window: float  # the same without drained ones
    inflight: float  # mean requests in the fleet
    requests: int
    unsent: int  # requests that the client meant to send before the end, and had not


def clock_ns(seconds: float) -> int:
    """Return virtual clock time in ns for seconds from the start."""
    return EPOCH + round(seconds * SECOND)


def measure(
    runs: Sequence[RequestRun], begin: float, end: float, gaps: ITLHistogram, workers: int, *,
    meant: bool = False,
) -> WindowFigures | None:  # fmt: skip
    """Return the figures of requests completed (and sent, if `meant`) in a window, or None."""
    low, high = clock_ns(begin), clock_ns(end)
    done = sorted(
        (run for run in runs if run.outcome is RunOutcome.DONE and run.last_token_ns > low),
        key=lambda run: run.last_token_ns,
    )
    since = low if meant else 0
    drained = [run for run in done if since <= run.intended_ns < high]
    inside = [run for run in drained if run.last_token_ns <= high]
    if not inside:
        return None
    busy = sum(
        min(run.last_token_ns, high) - max(run.sent_ns, low) for run in done if run.sent_ns < high
    )
    return WindowFigures(
        ttft_p99_s=_p99([run.first_token_ns - run.intended_ns for run in inside]),
        ttft_drained_p99_s=_p99([run.first_token_ns - run.intended_ns for run in drained]),
        server_ttft_p99_s=_p99([run.first_token_ns - run.sent_ns for run in inside]),
        wait_p99_s=_p99([run.sent_ns - run.intended_ns for run in inside]),
        e2e_mean_s=sum(run.last_token_ns - run.intended_ns for run in inside)
        / len(inside)
        / SECOND,
        itl_p99_s=float(gaps.percentiles(_SHARE)[0]),
        rps=sum(run.last_token_ns <= high for run in done) / (end - begin),
        poa_legacy=index(drained, workers),
        poa_window=index(inside, workers),
        inflight=busy / (high - low),
        requests=len(inside),
        unsent=sum(run.intended_ns < high and not 0 < run.sent_ns <= high for run in runs),
    )


class Switch(NamedTuple):
    """A change of the router's parameters in a run."""

    seconds: float  # from the beginning
    gaps: ITLHistogram  # gaps between tokens until then


class SwitchParts(NamedTuple):
    """Figures of a window before and after a switch; None where nothing was completed."""

    before: WindowFigures | None
    after: WindowFigures | None


def split(
    runs: Sequence[RequestRun], switch: Switch | None, window: tuple[float, float],
    gaps: Sequence[ITLHistogram], workers: int,
) -> SwitchParts:  # fmt: skip
    """Return the figures of requests meant before a switch in a window, and after it.

    `gaps` are those until the window's begin and end.
    """
    if switch is None:
        return SwitchParts(None, None)
    (begin, end), (low, high) = window, gaps
    return SwitchParts(
        measure(runs, begin, switch.seconds, _difference(low, switch.gaps), workers, meant=True),
        measure(runs, switch.seconds, end, _difference(switch.gaps, high), workers, meant=True),
    )


def columns(parts: Sequence[SwitchParts]) -> dict[str, list[float | None]]:
    """Return figures before and after the switch by name, a value a seed."""
    return {
        f"{name}_{key}": [None if (own := getattr(one, name)) is None else getattr(own, key)
                          for one in parts]
        for name in SwitchParts._fields
        for key in ("ttft_p99_s", "itl_p99_s", "poa_legacy", "rps", "inflight")
    }  # fmt: skip


def index(done: Sequence[RequestRun], workers: int) -> float:
    """Return the paper's index of the last 200 of some requests, in order of completion."""
    return legacy_index([(run.last_token_ns - run.intended_ns) / SECOND for run in done], workers)


def _p99(nanos: Sequence[int]) -> float:
    p99 = summary(np.array(nanos, dtype=np.int64))["p99"]
    assert p99 is not None
    return p99
