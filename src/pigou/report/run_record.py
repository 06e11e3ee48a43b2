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
    """Shares of all offered requests that were served within limits."""

    # requests meant to be sent, failed and unfinished ones too.
    offered_requests: int = msgspec.field(name="offered")
    # share by limit, of time to first token, time per token, and all; by name.
    curves: dict[str, Distribution]
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
    ttft_p50_s: list[float | None]  # of those meant in this window; None where none was served
    ttft_p99_s: list[float | None]


class Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A timeline (`pigou.sim.timeline`)."""

    period_s: float  # between two samples of the fleet
    time_s: list[float]
    fleet: dict[str, list[float | None]]
    worker_time_s: list[float]  # of the samples of the workers, which may be fewer
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
    # distributions over served requests, in seconds, by the name of the figure.
    curves: dict[str, Distribution]
    attainment: Attainment | None
    stages: list[Stage]  # mean seconds by stage
    load: list[LoadPoint]  # latency against load, in the order of the load
    course: Course | None  # rates and latencies over time
    samples: Samples | None  # queues, prices and workers over time; None without a timeline

    @property
    def seed(self) -> Any:
        """Seed of the run; None where it is not known."""
        return next((group["seed"] for group in self.config.values() if "seed" in group), None)
