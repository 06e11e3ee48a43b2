"""Record of a run, the input of its report and of comparisons with other runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou import __version__
from pigou.request import SECOND
from pigou.sim.request_run import RunOutcome
from pigou.sim.result import SimulationResult
from pigou.sim.timeline import FLEET, WORKER, Timeline

#: Shares at which distributions are recorded: every 0.5%, and finer in the tail.
SHARES = tuple(k / 200 for k in range(1, 198)) + tuple(0.99 + k / 1000 for k in range(11))
Floats = NDArray[np.float64]
TTFT_LIMITS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
TPOT_LIMITS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
#: Maximum windows of the course and groups of the load, minimum requests of such a group.
_WINDOWS, _GROUPS, _MIN_REQUESTS = 60, 20, 10
#: Maximum values of one figure of all workers; beyond, samples are thinned out.
_MAX_VALUES = 65536
_STAGES = (
    ("all", 0.0, 1.0), ("fastest half", 0.0, 0.5), ("50 to 90%", 0.5, 0.9),
    ("90 to 99%", 0.9, 0.99), ("slowest 1%", 0.99, 1.0),
)  # fmt: skip


class Distribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distribution: values at some shares, both rising.

    The value of share q of n requests is the k-th smallest, k = ceil(q n). Where failed requests
    have no value, shares end below 1.
    """

    share: list[float]
    value: list[float]


class Attainment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of all offered requests that were served within limits."""

    offered_requests: int = msgspec.field(name="offered")  # failed and unfinished too
    curves: dict[str, Distribution]  # share by limit of ttft, tpot, e2e
    ttft_s: list[float]  # limits of the grid's rows
    tpot_s: list[float]  # limits of the grid's columns
    grid: list[list[float]]  # share that keeps both limits, (ttft_s, tpot_s)


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean seconds of a group of served requests in each stage."""

    group: str  # name of the group, by end-to-end time
    requests: int
    client_s: float  # until the last attempt was sent
    queue_s: float
    first_s: float  # from there to the first token
    stream_s: float  # from the first to the last token


class LoadPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Latency of served requests at about the same load."""

    inflight: float  # mean requests in flight when they were meant to be sent, themselves included
    requests: int
    ttft_s: tuple[float, float]  # p50 and p99
    tpot_s: tuple[float, float] | None  # p50 and p99; None where no request had two tokens
    e2e_s: tuple[float, float]  # p50 and p99


class Course(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run by windows of equal length; latencies by when a request was meant to be sent."""

    time_s: list[float]  # middles of the windows
    offered_rps: list[float]  # requests meant to be sent
    completed_rps: list[float]  # requests served
    ttft_p50_s: list[float | None]  # by intended window; None where no request was served
    ttft_p99_s: list[float | None]


class Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A timeline (`pigou.sim.timeline`)."""

    period_s: float  # between two samples of the fleet
    time_s: list[float]
    fleet: dict[str, list[float | None]]
    worker_time_s: list[float]  # times of the workers' samples, which may be fewer
    workers: dict[str, dict[str, list[float | None]]]


class OutcomeCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many requests ended in the same way, for the same reason."""

    outcome: str
    reason: str
    requests: int


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run."""

    kind: str = "pigou simulation"
    pigou: str  # version that wrote it
    title: str  # name of the run
    config: dict[str, dict[str, Any]]  # all settings, with the seed; by group
    figures: dict[str, Any]  # as `pigou simulate --json` writes them
    outcomes: list[OutcomeCount]  # how requests ended
    curves: dict[str, Distribution]  # seconds of served requests, by figure
    attainment: Attainment | None
    stages: list[Stage]  # mean seconds by stage
    load: list[LoadPoint]  # latency against load, in the order of the load
    course: Course | None  # rates and latencies over time
    samples: Samples | None  # queues, prices and workers over time; None without a timeline

    @property
    def seed(self) -> Any:
        """Seed of the run; None where it is not known."""
        return next((group["seed"] for group in self.config.values() if "seed" in group), None)


def record(
    result: SimulationResult, timeline: Timeline | None, document: Mapping[str, Any], title: str,
    config: Mapping[str, dict[str, Any]],
) -> RunRecord:  # fmt: skip
    """Return the record of a run."""
    served = _Served(result)
    return RunRecord(
        pigou=__version__,
        title=title,
        config=dict(config),
        figures=dict(document),
        outcomes=_outcomes(result),
        curves=_curves(result, served),
        attainment=_attainment(served, len(result.runs)),
        stages=_stages(served),
        load=_load(result, served),
        course=_course(result, served),
        samples=None if timeline is None else _samples(timeline),
    )


class _Served:
    """Columns of the served requests, in seconds, (requests,) each; times from the beginning."""

    def __init__(self, result: SimulationResult) -> None:
        intended, sent, routed, first, last, tokens = result.column(
            "intended_ns", "sent_ns", "routed_ns", "first_token_ns", "last_token_ns",
            "output_tokens",
        )  # fmt: skip
        self.intended: Floats = (intended - result.begin_ns) / SECOND
        self.last: Floats = (last - result.begin_ns) / SECOND
        self.client: Floats = (sent - intended) / SECOND
        self.queue: Floats = (routed - sent) / SECOND
        self.first: Floats = (first - routed) / SECOND
        self.stream: Floats = (last - first) / SECOND
        self.ttft: Floats = (first - intended) / SECOND
        self.e2e: Floats = (last - intended) / SECOND
        self.server_ttft: Floats = (first - sent) / SECOND
        self.many: NDArray[np.bool_] = tokens > 1
        self.tpot: Floats = np.zeros(len(tokens))
        np.divide(self.stream, tokens - 1, out=self.tpot, where=self.many)
        self.count = len(tokens)


def _ranked(values: Floats, share: float) -> float:
    """Return the k-th smallest value, k = ceil(share n)."""
    return float(values[max(1, math.ceil(share * len(values))) - 1])


def _curve(values: Floats, total: int = 0) -> Distribution:
    """Return a distribution; with `total`, shares are of this number of requests."""
    if not len(values):
        return Distribution([], [])
    ordered = np.sort(values)
    scale = len(values) / total if total else 1.0
    return Distribution([q * scale for q in SHARES], [_ranked(ordered, q) for q in SHARES])


def _curves(result: SimulationResult, served: _Served) -> dict[str, Distribution]:
    gaps = Distribution([], [])
    if result.itl.count:
        percentiles = result.itl.percentiles(np.array(SHARES) * 100.0)
        gaps = Distribution(list(SHARES), percentiles.tolist())
    return {
        "ttft_s": _curve(served.ttft),
        "itl_s": gaps,
        "tpot_s": _curve(served.tpot[served.many]),
        "e2e_s": _curve(served.e2e),
        "client_wait_s": _curve(served.client),
        "server_ttft_s": _curve(served.server_ttft),
    }


def _attainment(served: _Served, total: int) -> Attainment | None:
    if not total:
        return None
    grid = [
        [
            float(((served.ttft <= ttft) & (served.tpot <= tpot)).sum()) / total
            for tpot in TPOT_LIMITS
        ]
        for ttft in TTFT_LIMITS
    ]
    curves = {
        "ttft_s": _curve(served.ttft, total),
        "tpot_s": _curve(served.tpot, total),
        "e2e_s": _curve(served.e2e, total),
    }
    return Attainment(total, curves, list(TTFT_LIMITS), list(TPOT_LIMITS), grid)


def _outcomes(result: SimulationResult) -> list[OutcomeCount]:
    reasons = {RunOutcome.PENDING: "cut off by the end of the run"}
    counts = Counter(
        (run.outcome.value, reasons.get(run.outcome, run.reason)) for run in result.runs
    )
    return [
        OutcomeCount(outcome, reason, count) for (outcome, reason), count in counts.most_common()
    ]


def _stages(served: _Served) -> list[Stage]:
    order = np.argsort(served.e2e, kind="stable")
    stages = []
    for name, low, high in _STAGES:
        rows = order[round(low * served.count) : round(high * served.count)]
        if len(rows):
            parts = (served.client, served.queue, served.first, served.stream)
            stages.append(Stage(name, len(rows), *(float(part[rows].mean()) for part in parts)))
    return stages


def _load(result: SimulationResult, served: _Served) -> list[LoadPoint]:
    """Group served requests by their load, into groups of about equal size."""
    if not served.count:
        return []
    ended = np.sort([run.ended_ns for run in result.runs if run.outcome is not RunOutcome.PENDING])
    done = result.done
    intended = np.array([run.intended_ns for run in done])
    begun = np.array([run.number for run in done]) + 1
    met = begun - np.searchsorted(ended, intended, side="right")
    order = np.argsort(met, kind="stable")
    groups = max(1, min(_GROUPS, served.count // _MIN_REQUESTS))
    edges = np.unique(met[order[[k * served.count // groups for k in range(groups)]]])
    indices = np.searchsorted(edges, met, side="right")
    points = []
    for group in range(1, len(edges) + 1):
        rows = indices == group
        many = rows & served.many
        pairs = [_pair(values) for values in (served.ttft[rows], served.e2e[rows])]
        tpot = _pair(served.tpot[many]) if many.any() else None
        points.append(LoadPoint(float(met[rows].mean()), int(rows.sum()), pairs[0], tpot, pairs[1]))
    return points


def _pair(values: Floats) -> tuple[float, float]:
    ordered = np.sort(values)
    return _ranked(ordered, 0.5), _ranked(ordered, 0.99)


def _course(result: SimulationResult, served: _Served) -> Course | None:
    if not result.seconds:
        return None
    intended = np.array([run.intended_ns - result.begin_ns for run in result.runs]) / SECOND
    windows = max(1, min(_WINDOWS, len(result.runs) // _MIN_REQUESTS))
    edges = np.linspace(0.0, result.seconds, windows + 1)
    width = result.seconds / windows
    indices = np.clip(np.searchsorted(edges, served.intended, side="right") - 1, 0, windows - 1)
    pairs = [
        _pair(served.ttft[rows]) if (rows := indices == k).any() else (None, None)
        for k in range(windows)
    ]
    return Course(
        time_s=((edges[1:] + edges[:-1]) / 2).tolist(),
        offered_rps=(np.histogram(intended, edges)[0] / width).tolist(),
        completed_rps=(np.histogram(served.last, edges)[0] / width).tolist(),
        ttft_p50_s=[pair[0] for pair in pairs],
        ttft_p99_s=[pair[1] for pair in pairs],
    )


def _samples(timeline: Timeline) -> Samples:
    times = timeline.times
    thin = max(1, math.ceil(len(times) * len(timeline.workers) / _MAX_VALUES))
    return Samples(
        period_s=timeline.period / SECOND,
        time_s=times.tolist(),
        fleet={name: _rounded(timeline.fleet(name)) for name in FLEET},
        worker_time_s=times[::thin].tolist(),
        workers={
            worker: {name: _rounded(timeline.worker(name)[::thin, row]) for name in WORKER}
            for row, worker in enumerate(timeline.workers)
        },
    )


def _rounded(values: NDArray[Any]) -> list[float | None]:
    """Return values with six significant digits, None for NaN and infinities."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
