"""Lead of alerts before an objective breaks, over the fault trials.

| row | alarm at the first of every five seconds in which |
|---|---|
| anarchy | the Price of Anarchy of the last minute is at least 1.1, as in reports |
| queue | over eight requests wait, more than five and ten seconds before |
| late | over 1% of the requests of the last 30 s are late |

The objective is a first token within a second for 95% of the requests of 30 s. `QUEUE` was chosen
on seeds 1 to 3, so that the healthy fleet has no alarm. A lead is None without an alarm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.control.price_of_anarchy import PoAEstimate
from pigou.request import SECOND
from pigou.sim.simulation import Simulation
from pigou.sim.virtual_clock import EPOCH
from pigou_lab.experiments.fault_trials import TRIALS, simulate
from pigou_lab.experiments.fleets import PaperFleet, Reading
from pigou_lab.experiments.results import Row

Numbers = NDArray[np.float64]
MODES = tuple(TRIALS)
TTFT_S, SHARE, WINDOW_S, STEP_S = 1.0, 0.95, 30.0, 5.0
#: Thresholds of the alarms, and the requests that a share needs.
ANARCHY, QUEUE, LATE, MIN_REQUESTS = 1.1, 8, 0.01, 20
SIGNALS = ("anarchy", "queue", "late")


class _TimedEstimates(list[PoAEstimate]):
    """Estimates, and when each was made in seconds."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._clock, self.series = simulation.clock, list[tuple[float, float]]()

    def append(self, estimate: PoAEstimate) -> None:
        """Add an estimate."""
        self.series.append(((self._clock.now - EPOCH) / SECOND, estimate.anarchy.whole.value))
        super().append(estimate)


def alarms(mode: int, seed: int) -> dict[str, float | None]:
    """Return the second at which the objective of a trial breaks, and each signal's first alarm."""
    simulation = simulate(mode, seed, assess_every=STEP_S)
    simulation.fleet.assessments = estimates = _TimedEstimates(simulation)
    simulation.run()
    runs = [run for run in simulation.client.runs if run.sent_ns]
    sent = np.array([(run.sent_ns - EPOCH) / SECOND for run in runs])
    first = np.array([(run.first_token_ns - EPOCH) / SECOND if run.first_token_ns else np.inf
                      for run in runs])  # fmt: skip
    ended = np.array([(run.ended_ns - EPOCH) / SECOND if run.ended_ns else np.inf for run in runs])
    times = np.arange(STEP_S, sent.max() + WINDOW_S, STEP_S)
    waiting = [int(((sent <= t) & (first > t) & (ended > t)).sum()) for t in times]
    shares = [_late(sent, first, t) for t in times]
    queue = [
        index >= 2 and waiting[index] > QUEUE and waiting[index] > waiting[index - 1] > 0
        and waiting[index - 1] > waiting[index - 2]
        for index in range(len(times))
    ]  # fmt: skip
    return {
        "broken": _first(times, [share > 1.0 - SHARE for share in shares]),
        "anarchy": next((at for at, poa in estimates.series if poa >= ANARCHY), None),
        "queue": _first(times, queue),
        "late": _first(times, [share > LATE for share in shares]),
    }


def _late(sent: Numbers, first: Numbers, now: float) -> float:
    """Return the late share of the requests of the last window whose fate is known."""
    due = (sent > now - WINDOW_S - TTFT_S) & (sent <= now - TTFT_S)
    count = int(due.sum())
    return float((first[due] - sent[due] > TTFT_S).mean()) if count >= MIN_REQUESTS else 0.0


def _first(times: Numbers, alarm: Sequence[bool]) -> float | None:
    return next((float(at) for at, is_on in zip(times, alarm, strict=True) if is_on), None)


def alerts(
    _fleet: PaperFleet, _reading: Reading, seeds: Sequence[int], levels: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for each mode: median leads in seconds, and false alarms."""
    for mode in levels:
        runs = [alarms(mode, seed) for seed in seeds]
        row: Row = {"experiment": "alerts", "concurrency": mode, "runs": runs}
        row["fault"] = TRIALS[mode].__name__.strip("_").replace("_", " ")
        row["broken"] = sum(run["broken"] is not None for run in runs)
        for name in SIGNALS:
            row[f"{name}_lead_s"] = _median_lead(runs, name)
            row[f"{name}_false"] = sum(
                run["broken"] is None and run[name] is not None for run in runs
            )
        yield row | dict.fromkeys(("ttft_p99_s", "itl_p99_s", "poa_legacy", "rps"))


def _median_lead(runs: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    leads = [
        broken - alarm if (alarm := run[name]) is not None else -np.inf
        for run in runs
        if (broken := run["broken"]) is not None
    ]
    middle = float(np.median(leads)) if leads else -np.inf
    return middle if np.isfinite(middle) else None


def leads(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Return for each signal: broken runs that it announced, runs in all, and false alarms."""
    runs = [run for row in rows for run in row["runs"]]
    broken = [run for run in runs if run["broken"] is not None]
    return {
        name: {
            "before": sum(run[name] is not None and run[name] < run["broken"] for run in broken),
            "broken": len(broken),
            "false": sum(run["broken"] is None and run[name] is not None for run in runs),
            "unbroken": len(runs) - len(broken),
        }
        for name in SIGNALS
    }
