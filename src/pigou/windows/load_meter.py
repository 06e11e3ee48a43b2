"""The load meter: load windows of a planner, from the requests that a gateway saw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pigou.control.latency_model.estimates import pairs
from pigou.control.price_of_anarchy import PoAEstimate
from pigou.objectives import Objectives
from pigou.request import SECOND
from pigou.windows.planner_window import LatencySummary, LoadWindow

PERCENTILES = np.array([50.0, 90.0, 95.0, 99.0])
PERCENTILE_NAMES = ("p50", "p90", "p95", "p99")


class ComputedPrompt(NamedTuple):
    """A prompt that was computed: by which worker, its tokens, those that were not cached, when."""

    worker: str
    prompt: int
    uncached: int
    at_ns: int = 0


class MeteredRequest(NamedTuple):
    """A request as the gateway saw it, at the end of a window."""

    workload: str  # name of its class
    prompt_tokens: int
    intended_ns: int  # when its client meant to send it
    arrival_ns: int  # when it came; latencies count from it
    first_token_ns: int = 0  # of its first token; 0 where it is not known
    ended_ns: int = 0
    output_tokens: int = 0  # that it has; 0 where its server does not tell
    # mean nanoseconds between its tokens; None where it has fewer than two.
    itl_ns: float | None = None
    is_done: bool = False  # whether it ended well
    is_attained: bool = False  # whether it did, and is inside its objective
    # its prompt, once that was computed; None where that is not known.
    computed: ComputedPrompt | None = None

    @property
    def ttft_ns(self) -> int | None:
        """Nanoseconds to its first token; None where it has none."""
        return self.first_token_ns - self.arrival_ns if self.first_token_ns else None


class MeteredWindow(NamedTuple):
    """Requests of one window.

    Attributes:
        arrived, first, ended: those that came, that had their first token, that ended in it.
    """

    arrived: Sequence[MeteredRequest]
    first: Sequence[MeteredRequest]
    ended: Sequence[MeteredRequest]
    generated: Mapping[str, int]  # tokens that were generated in it, by class
    in_flight: Mapping[str, int]  # requests that are not ended, by class
    # prompt tokens of requests that wait at the gateway, by class.
    queued: Mapping[str, Sequence[int]]


class LoadMeter:
    """Makes the load windows of one model, one for each class, window after window."""

    def __init__(self, objectives: Objectives, model: str = "") -> None:
        """Begin.

        Args:
            objectives: of requests; each class is a load of its own.
        """
        self.objectives, self.model = objectives, model
        self._last_arrival_ns: dict[str, int] = {}

    def loads(self, window: MeteredWindow) -> tuple[LoadWindow, ...]:
        """Return the load of each class."""
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
            arrival_scv=self._arrival_scv(name, arrived),
            ttft=_latencies(request.ttft_ns for request in first),
            itl=_latencies(request.itl_ns for request in done),
            request_s=_mean([(one.ended_ns - one.arrival_ns) / SECOND for one in ended]),
            completed=len(done),
            attained=attained,
            output_tokens=float(window.generated.get(name, 0)),
            queued=len(queued),
            queued_tokens=float(sum(queued)),
            in_flight=window.in_flight.get(name, 0),
        )

    def _arrival_scv(self, name: str, arrived: Sequence[MeteredRequest]) -> float | None:
        times = [request.intended_ns for request in arrived]
        if times and name in self._last_arrival_ns:
            times.insert(0, self._last_arrival_ns[name])
        if times:
            self._last_arrival_ns[name] = times[-1]
        return squared_variation(np.diff(np.array(times, dtype=np.float64)))


@dataclass(slots=True)
class WorkerCounts:
    """What a worker did in a window: prompts that it computed, and looks at what runs there."""

    prompts: int = 0
    tokens: int = 0
    pairs: float = 0.0
    samples: int = 0
    running: float = 0.0
    held_tokens: float = 0.0

    def add_prompt(self, computed: ComputedPrompt) -> None:
        """Count a prompt that it computed."""
        self.prompts += 1
        self.tokens += computed.uncached
        self.pairs += float(pairs(computed.uncached, computed.prompt))

    def observe_tokens(self, tokens: float | None) -> None:
        """Let the worker's own count of prompt tokens take the place of the ended prompts'.

        It is that of its seconds: prompts that a window cuts, that a client gave up, or whose first
        token waits for a decode worker, take seconds too. None, and 0 of no prompt, change nothing.
        """
        if tokens is not None and self.tokens:
            self.pairs *= tokens / self.tokens
            self.tokens = round(tokens)

    def sample(self, running: float, held_tokens: float) -> None:
        """Add a look at its running requests, and at the tokens that they hold."""
        self.samples += 1
        self.running += running
        self.held_tokens += held_tokens

    @property
    def mean_running(self) -> float | None:
        """Mean of the looks; None without any."""
        return self.running / self.samples if self.samples else None

    @property
    def mean_held_tokens(self) -> float | None:
        """Mean of the looks; None without any."""
        return self.held_tokens / self.samples if self.samples else None


def anarchy_of(model: str, estimate: PoAEstimate | None) -> tuple[dict[str, float], dict[str, int]]:
    """Return what a window has of a model's routing, empty where it is not known.

    The Price of Anarchy, and prefill workers of a better split.
    """
    if estimate is None:
        return {}, {}
    better = estimate.better_prefill
    return {model: estimate.anarchy.whole.value}, {} if better is None else {model: better}


def latency_summary(nanos: Sequence[float] | NDArray[Any]) -> LatencySummary:
    """Return mean and percentiles in seconds; None where there is nothing.

    The percentile of share q among n sorted values is value k = ceil(q n).
    """
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
    """Return the variance over the squared mean; None of fewer than two values."""
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
