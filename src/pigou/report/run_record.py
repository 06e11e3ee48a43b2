"""The record of a run: what its report and comparisons with other runs are made from."""

from __future__ import annotations

from typing import Any

import msgspec

#: Shares at which distributions are recorded: every 0.5%, and finer in the tail.
SHARES = tuple(k / 200 for k in range(1, 198)) + tuple(0.99 + k / 1000 for k in range(11))


class Distribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distribution: values at some shares, both rising.

    The value of share q of n requests is the k-th smallest, k = ceil(q n). Where failed requests
    have no value, shares end below 1.
    """

    share: list[float]
    value: list[float]


class Attainment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of all offered requests that were served within limits.

    Attributes:
        offered_requests: requests meant to be sent, failed and unfinished ones too.
        curves: share by limit, of time to first token, time per token, and all; by name.
        ttft_s: limits of the grid's rows.
        tpot_s: limits of the grid's columns.
        grid: share that keeps both limits, (ttft_s, tpot_s).
    """

    offered_requests: int = msgspec.field(name="offered")
    curves: dict[str, Distribution]
    ttft_s: list[float]
    tpot_s: list[float]
    grid: list[list[float]]


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean seconds of a group of served requests in each stage.

    Attributes:
        group: name of the group, by end-to-end time.
        requests: how many.
        client_s: until the last attempt was sent.
        queue_s: from there to its route.
        first_s: from there to the first token.
        stream_s: from the first to the last token.
    """

    group: str
    requests: int
    client_s: float
    queue_s: float
    first_s: float
    stream_s: float


class LoadPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Latency of served requests at about the same load.

    Attributes:
        inflight: mean requests in flight when they were meant to be sent, themselves included.
        requests: how many.
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


class OutcomeCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many requests ended in the same way, for the same reason."""

    outcome: str
    reason: str
    requests: int


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run.

    Attributes:
        kind: what this file is.
        pigou: version that wrote it.
        title: name of the run.
        config: all settings, with the seed; by group.
        figures: as `pigou simulate --json` writes them.
        outcomes: how requests ended.
        curves: distributions over served requests, in seconds, by the name of the figure.
        attainment: of all offered requests.
        stages: mean seconds by stage.
        load: latency against load, in the order of the load.
        course: rates and latencies over time.
        samples: queues, prices and workers over time; None without a timeline.
    """

    kind: str = "pigou simulation"
    pigou: str
    title: str
    config: dict[str, dict[str, Any]]
    figures: dict[str, Any]
    outcomes: list[OutcomeCount]
    curves: dict[str, Distribution]
    attainment: Attainment | None
    stages: list[Stage]
    load: list[LoadPoint]
    course: Course | None
    samples: Samples | None

    @property
    def seed(self) -> Any:
        """Seed of the run; None where it is not known."""
        return next((group["seed"] for group in self.config.values() if "seed" in group), None)
