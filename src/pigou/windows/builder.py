"""Builders of windows: requests, samples and counters in; planner and diagnosis windows out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.control.latency_model.estimates import pairs
from pigou.control.plane import ControlPlane
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.control.router import RouteMeter
from pigou.objectives import Objectives
from pigou.request import SECOND, Worker
from pigou.windows.observations import FleetObservation, TenantObservation
from pigou.windows.planner_window import (
    LatencySummary,
    LoadWindow,
    PlannerWindow,
    PoolWindow,
    WorkerWindow,
)
from pigou.windows.prompts import PromptLengths, percentile

PERCENTILES = np.array([50.0, 90.0, 95.0, 99.0])
PERCENTILE_NAMES = ("p50", "p90", "p95", "p99")


class ComputedPrompt(NamedTuple):
    """A prompt that a worker computed."""

    worker: str
    prompt: int  # prompt tokens
    uncached: int  # computed tokens
    at_ns: int = 0  # completion time


class MeteredRequest(NamedTuple):
    """A request as the gateway saw it, at the end of a window."""

    workload: str  # class name
    prompt_tokens: int
    intended_ns: int  # intended send time of the client
    arrival_ns: int  # start of all latencies
    first_token_ns: int = 0  # 0 if unknown
    ended_ns: int = 0
    output_tokens: int = 0  # so far; 0 if the server does not report
    itl_ns: float | None = None  # mean ITL; None for fewer than two tokens
    is_done: bool = False  # whether it ended successfully
    is_attained: bool = False  # whether it is also inside its objective
    is_offered: bool = True  # False: withdrawn by its client in time, or invalid
    computed: ComputedPrompt | None = None  # None if unknown

    @property
    def ttft_ns(self) -> int | None:
        """TTFT in nanoseconds; None before the first token."""
        return self.first_token_ns - self.arrival_ns if self.first_token_ns else None


class MeteredWindow(NamedTuple):
    """Requests of one window."""

    arrived: Sequence[MeteredRequest]
    first: Sequence[MeteredRequest]  # with their first token in the window
    ended: Sequence[MeteredRequest]
    generated: Mapping[str, int]  # output tokens by class
    in_flight: Mapping[str, int]  # unfinished requests by class
    queued: Mapping[str, Sequence[int]]  # prompt tokens of requests queued at the gateway, by class


class LoadMeter:
    """Makes the load windows of one model, one per class."""

    def __init__(self, objectives: Objectives, model: str = "") -> None:
        self.objectives, self.model = objectives, model
        self._last_bins: dict[str, tuple[int, int]] = {}  # last bin and its arrivals, by class

    def loads(self, window: MeteredWindow) -> tuple[LoadWindow, ...]:
        """Return the load window of each class."""
        arrived, first, ended = (
            _by_class(requests) for requests in (window.arrived, window.first, window.ended)
        )
        return tuple(
            self._load(name, window, arrived.get(name, []), first.get(name, []),
                       ended.get(name, []))
            for name in self.objectives.names
        )  # fmt: skip

    def _load(
        self, name: str, window: MeteredWindow, arrived: Sequence[MeteredRequest],
        first: Sequence[MeteredRequest], ended: Sequence[MeteredRequest],
    ) -> LoadWindow:  # fmt: skip
        computed = [request.computed for request in first if request.computed is not None]
        prompt_tokens = sum(entry.prompt for entry in computed)
        uncached = sum(entry.uncached for entry in computed)
        done = [request for request in ended if request.is_done]
        prompts = np.array([request.prompt_tokens for request in arrived], dtype=np.float64)
        request_s = [(one.ended_ns - one.arrival_ns) / SECOND for one in ended]
        queued = window.queued.get(name, ())
        attained = None
        if self.objectives.known:
            attained = sum(request.is_attained for request in done)
        return LoadWindow(
            model=self.model,
            workload=name,
            arrivals=len(arrived),
            isl=float(prompts.mean()) if len(prompts) else None,
            isl_scv=squared_variation(prompts),
            osl=_mean([one.output_tokens for one in done if one.output_tokens]),
            hit_rate=1.0 - uncached / prompt_tokens if prompt_tokens else None,
            arrival_scv=self._dispersion(name, arrived),
            ttft=_latencies(request.ttft_ns for request in first),
            itl=_latencies(request.itl_ns for request in done),
            request_s=_mean(request_s),
            longest_s=max(request_s, default=None),
            completed=len(done),
            attained=attained,
            ended=sum(one.is_offered for one in ended),
            output_tokens=float(window.generated.get(name, 0)),
            queued=len(queued),
            queued_tokens=float(sum(queued)),
            in_flight=window.in_flight.get(name, 0),
        )

    def _dispersion(self, name: str, arrived: Sequence[MeteredRequest]) -> float | None:
        """Return the index of dispersion of counts in bins of a quarter of the TTFT objective.

        sum (n' - n)^2 / sum (n' + n) over neighbouring bins: 1 for Poisson arrivals, the size of
        bursts for arrivals in bursts. The last bin is continued by the next window.
        """
        if not arrived:
            return None
        slo = self.objectives.slo_of(name)
        bin_s = 1.0 if slo is None or math.isinf(slo.ttft_s) else 0.25 * slo.ttft_s
        bins = Counter(one.intended_ns // max(round(bin_s * SECOND), 1) for one in arrived)
        last = self._last_bins.get(name)
        if last is not None:
            bins[last[0]] += last[1]
        end = max(bins)
        self._last_bins[name] = (end, bins[end])
        squares = total = 0.0
        for at in {*bins, *(bin + 1 for bin in bins)}:
            if min(bins) < at < end:
                squares += (bins[at] - bins[at - 1]) ** 2
                total += bins[at] + bins[at - 1]
        return squares / total if total else None


@dataclass(slots=True)
class WorkerCounts:
    """Prompts that a worker computed in a window, and samples of its load."""

    prompts: int = 0
    tokens: int = 0
    pairs: float = 0.0
    samples: int = 0
    running: float = 0.0
    held_tokens: float = 0.0

    def add_prompt(self, computed: ComputedPrompt) -> None:
        """Count a computed prompt."""
        self.prompts += 1
        self.tokens += computed.uncached
        self.pairs += float(pairs(computed.uncached, computed.prompt))

    def observe_tokens(self, tokens: float | None) -> None:
        """Use the worker's own token count, as its seconds cover cut and abandoned prompts, too."""
        if tokens is not None and self.tokens:
            self.pairs *= tokens / self.tokens
            self.tokens = round(tokens)

    def sample(self, running: float, held_tokens: float) -> None:
        """Add a sample of running requests and their held tokens."""
        self.samples += 1
        self.running += running
        self.held_tokens += held_tokens

    @property
    def mean_running(self) -> float | None:
        """Mean of the samples; None without any."""
        return self.running / self.samples if self.samples else None

    @property
    def mean_held_tokens(self) -> float | None:
        """Mean of the samples; None without any."""
        return self.held_tokens / self.samples if self.samples else None


class PlannerWindowBuilder:
    """Builds consecutive planner windows."""

    def __init__(self, begin_ns: int) -> None:
        self.last_ns = begin_ns  # end of the last window
        self.counts: dict[str, WorkerCounts] = {}

    def counts_of(self, worker: str) -> WorkerCounts:
        """Return a worker's counts in the current window."""
        return self.counts.setdefault(worker, WorkerCounts())

    def worker(
        self, life: WorkerWindow, worker: Worker, plane: ControlPlane, row: int,
        prefill_tokens: float | None, **figures: Any,
    ) -> WorkerWindow:  # fmt: skip
        """Return a worker's window; `figures` are fields of `WorkerWindow`, None means unknown."""
        columns, router = plane.state.columns, plane.router
        if router.meter is None:
            router.meter = RouteMeter()
        counts = self.counts.pop(life.id, WorkerCounts())
        counts.observe_tokens(prefill_tokens)
        known: dict[str, Any] = {
            "location": worker.location,
            "queued_prefill_tokens": float(columns.prefill_tokens.item(row)),
            "kv_tokens": worker.blocks * worker.block_size or None,
            "held_tokens": float(columns.decode_tokens.item(row)),
            "mean_running": counts.mean_running,
            "mean_held_tokens": counts.mean_held_tokens,
            "computed_prompts": counts.prompts,
            "computed_tokens": float(counts.tokens),
            "computed_pairs": counts.pairs,
            "routed_tokens": router.meter.take(worker.id),
        }
        return msgspec.structs.replace(life, **known | figures)

    def window(
        self, now: int, loads: tuple[LoadWindow, ...], pools: tuple[PoolWindow, ...],
        routing: Mapping[str, PoAEstimate | None],
    ) -> PlannerWindow:  # fmt: skip
        """End the current window and return it; `routing` has each model's Price of Anarchy."""
        estimates = {model: poa for model, poa in routing.items() if poa is not None}
        seconds, self.last_ns = max(now - self.last_ns, 1) / SECOND, now
        return PlannerWindow(
            now_ns=now,
            seconds=seconds,
            loads=loads,
            pools=pools,
            price_of_anarchy={m: poa.anarchy.whole.value for m, poa in estimates.items()},
            better_prefill={
                model: poa.better_prefill
                for model, poa in estimates.items()
                if poa.better_prefill is not None
            },
        )


class ObservationBuilder:
    """Builds diagnosis windows from requests that arrive, begin and end."""

    def __init__(self) -> None:
        self.weights: Mapping[str, float] = {}  # weights by tenant; 1 for the others
        self.lengths = PromptLengths()
        self._begin_window()

    def _begin_window(self) -> None:
        self.counts: Counter[str] = Counter()  # arrived, completed, failed, refused, repeated
        self.tokens: Counter[str] = Counter()  # by tenant: prompts that began, and outputs
        self.ttft_s: list[float] = []
        self.wait_s: list[tuple[int, float]] = []  # prompt tokens and waits of started requests

    def window(
        self, start_s: float, seconds: float, late: Sequence[tuple[int, float]],
        computed: Iterable[int], waiting: Mapping[str, float],
        held: Mapping[str, int] | None = None, **figures: Any,
    ) -> FleetObservation:  # fmt: skip
        """End the current window and return it; `figures` are fields of `FleetObservation`.

        `late` has (prompt tokens, seconds so far) of waiting requests; `held` is KV token-seconds.
        """
        names = sorted({*self.tokens, *waiting, *(held or ())})
        tenants = tuple(
            TenantObservation(
                tenant=name,
                weight=float(self.weights.get(name, 1.0)),
                tokens=float(self.tokens[name]),
                kv_token_s=None if held is None else float(held.get(name, 0)),
                waiting=float(waiting.get(name, 0.0)),
            )
            for name in names
        )
        counts = {name: self.counts[name] for name in
                  ("arrived", "completed", "failed", "refused", "repeated")}  # fmt: skip
        wait_figures = self.lengths.wait_figures([*self.wait_s, *late])
        known: dict[str, Any] = {**figures, **counts, **wait_figures}
        made = FleetObservation(
            start_s=start_s,
            seconds=seconds,
            ttft_p50_s=percentile(self.ttft_s, 50),
            wait_p50_s=percentile([wait for _, wait in self.wait_s], 50),
            longest_prompt_tokens=max(computed, default=0),
            tenants=tenants,
            **known,
        )
        self._begin_window()
        return made


def latency_summary(nanos: Sequence[float] | NDArray[Any]) -> LatencySummary:
    """Return mean and percentiles in seconds, None without values; share q is the ceil(q n)-th."""
    if not len(nanos):
        return LatencySummary()
    ordered = np.sort(np.asarray(nanos))
    ranks = np.maximum(1, np.ceil(PERCENTILES / 100 * len(ordered))).astype(np.int64)
    mean = math.fsum(ordered.tolist()) / len(ordered) / SECOND
    percentiles = (ordered[ranks - 1] / SECOND).tolist()
    return LatencySummary(mean=mean, **dict(zip(PERCENTILE_NAMES, percentiles, strict=True)))


def _latencies(nanos: Iterable[float | None]) -> LatencySummary:
    return latency_summary([value for value in nanos if value is not None])


def squared_variation(values: NDArray[np.float64]) -> float | None:
    """Return variance over squared mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = float(values.mean())
    return float(values.var(ddof=1)) / mean**2 if mean else None


def _by_class(requests: Iterable[MeteredRequest]) -> dict[str, list[MeteredRequest]]:
    classes: dict[str, list[MeteredRequest]] = {}
    for request in requests:
        classes.setdefault(request.workload, []).append(request)
    return classes


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
