"""What is kept of a run for its report, and read again to lay runs beside each other."""

from __future__ import annotations

from typing import Any

import msgspec

#: Shares at which distributions are kept: every 0.5%, and finer in the tail.
SHARES = tuple(k / 200 for k in range(1, 198)) + tuple(0.99 + k / 1000 for k in range(11))


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distribution: the values at some shares of its members, both rising.

    The value of share q among n members is the k-th smallest, k = ceil(q n). Where failed members
    have no value, shares end below 1.
    """

    share: list[float]
    value: list[float]


class Attainment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of all offered requests that were served within limits.

    Attributes:
        offered: requests that were meant to be sent; those that failed, or were cut off, count.
        curves: share by limit, of time to first token, time per token, and all; by name.
        ttft_s: limits of the grid's rows.
        tpot_s: limits of the grid's columns.
        grid: share that keeps both limits, (ttft_s, tpot_s).
    """

    offered: int
    curves: dict[str, Curve]
    ttft_s: list[float]
    tpot_s: list[float]
    grid: list[list[float]]


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the time of a group of served requests went, mean seconds each.

    Attributes:
        group: which ones, by their end-to-end time.
        requests: how many.
        client_s: until it was sent: for a connection, and attempts before the last.
        queue_s: from there until workers were chosen.
        first_s: from there to the first token.
        stream_s: from the first to the last token.
    """

    group: str
    requests: int
    client_s: float
    queue_s: float
    first_s: float
    stream_s: float


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Latency of served requests that met about the same load.

    Attributes:
        inflight: mean number of requests under way when they were meant to be sent, themselves
            counted.
        requests: how many there are.
        ttft_s: p50 and p99.
        tpot_s: p50 and p99; None where no request had two tokens.
        e2e_s: p50 and p99.
    """

    inflight: float
    requests: int
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float] | None
    e2e_s: tuple[float, float]


class Course(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run by windows of equal length; latencies by when a request was meant to be sent.

    Attributes:
        time_s: middles of the windows.
        offered_rps: requests meant to be sent.
        completed_rps: requests served.
        ttft_p50_s: of those meant in this window; None where none was served.
        ttft_p99_s: the same.
    """

    time_s: list[float]
    offered_rps: list[float]
    completed_rps: list[float]
    ttft_p50_s: list[float | None]
    ttft_p99_s: list[float | None]


class Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A timeline (`pigou.sim.timeline`).

    Attributes:
        period_s: between two samples of the fleet.
        time_s: of these.
        fleet: by name.
        worker_time_s: of the samples of the workers, which may be fewer.
        workers: by worker, by name.
    """

    period_s: float
    time_s: list[float]
    fleet: dict[str, list[float | None]]
    worker_time_s: list[float]
    workers: dict[str, dict[str, list[float | None]]]


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many requests ended in the same way, for the same reason."""

    outcome: str
    reason: str
    requests: int


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run.

    Attributes:
        kind: what this file is.
        pigou: version that wrote it.
        title: name of the run.
        config: all that was asked for, with the seed; by group.
        figures: as `pigou simulate --json` writes them.
        outcomes: how requests ended.
        curves: distributions over served requests, in seconds, by the name of the figure.
        attainment: of all that were offered.
        stages: where the time went.
        load: latency against load, in the order of the load.
        course: rates and latencies over time.
        samples: queues, prices and workers over time; None for a run that was not watched.
    """

    kind: str = "pigou simulation"
    pigou: str
    title: str
    config: dict[str, dict[str, Any]]
    figures: dict[str, Any]
    outcomes: list[Reason]
    curves: dict[str, Curve]
    attainment: Attainment | None
    stages: list[Stage]
    load: list[Load]
    course: Course | None
    samples: Samples | None

    @property
    def seed(self) -> Any:
        """That the run was made with; None where it is not known."""
        return next((group["seed"] for group in self.config.values() if "seed" in group), None)
