"""Loads that planners are tried on, and the demand that a clairvoyant knows of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.routing.policy_workloads import read_cached
from pigou.performance.speed import RequestMix
from pigou.request import SECOND
from pigou.sim.arrival_rate import RateSchedule
from pigou.sim.workload import OpenLoop, RequestLengths, merged, renewal
from pigou.workload.workload_spec import from_trace

Floats = NDArray[np.float64]
#: Seconds of a step of `Demand`, and of the mean over a trace's arrivals.
STEP_S, SMOOTHED_S = 10.0, 30.0


@dataclass(frozen=True)
class Demand:
    """What arrives in each step of `STEP_S` seconds."""

    rps: Floats  # requests a second, shape (steps,)
    mixes: tuple[RequestMix, ...]  # mix of requests in each step


@dataclass(frozen=True)
class LoadPart:
    """Poisson arrivals of a schedule, and their lengths."""

    schedule: RateSchedule
    lengths: RequestLengths


@dataclass(frozen=True)
class PlannerLoad:
    """A load of one model: Poisson parts, or a window of a trace."""

    name: str
    seconds: float
    parts: tuple[LoadPart, ...] = ()
    trace: str = ""  # name of a trace's file under the folder of traces; "" where there are parts
    # consecutive requests of the trace to send; their times are stretched to `seconds`.
    requests: int = 0
    # share of the trace before the first of them; each seed begins a 50th later.
    begin: float = field(default=0.0)

    def scaled(self, factor: float) -> PlannerLoad:
        """Return the load with its rate times `factor`; a trace stays."""
        parts = tuple(
            replace(
                part,
                schedule=RateSchedule(
                    seconds=part.schedule.seconds,
                    rates=tuple(factor * rate for rate in part.schedule.rates),
                ),
            )
            for part in self.parts
        )
        return replace(self, parts=parts)

    def draw(self, traces: Path, seed: int) -> OpenLoop:
        """Return the requests of a seed."""
        if self.trace:
            return self._window(traces, seed)
        return merged(
            [
                renewal(part.lengths, part.schedule, 1.0, 0, self.seconds, 17 * seed + number)
                for number, part in enumerate(self.parts)
            ]
        )

    def demand(self, loop: OpenLoop) -> Demand:
        """Return the schedule's rates, or the trace's arrivals as a moving mean."""
        steps = math.ceil(self.seconds / STEP_S)
        at = STEP_S * (np.arange(steps) + 0.5)
        if self.trace:
            return _trace_demand(loop, steps)
        rates = np.array([[part.schedule.at(t) for t in at] for part in self.parts])
        mixes = {}
        for column in {tuple(column) for column in rates.T}:
            mixes[column] = _mixed([part.lengths for part in self.parts], column)
        return Demand(rates.sum(axis=0), tuple(mixes[tuple(column)] for column in rates.T))

    def _window(self, traces: Path, seed: int) -> OpenLoop:
        trace = read_cached(traces / self.trace)
        first = round(len(trace.sessions) * (self.begin + (seed % 10) / 50))
        kept = trace.sessions[first : first + self.requests]
        stretch = self.seconds / (kept[-1].start - kept[0].start)
        moved = tuple(replace(s, start=(s.start - kept[0].start) * stretch) for s in kept)
        return from_trace(replace(trace, sessions=moved))


def pieces(*pairs: tuple[float, float]) -> RateSchedule:
    """Return a schedule of (second, requests a second)."""
    seconds, rates = zip(*pairs, strict=True)
    return RateSchedule(seconds=seconds, rates=rates)


def wave(mean: float, swing: float, period_s: float, seconds: float) -> RateSchedule:
    """Return a sine of a day that is compressed to `period_s`, lowest at its begin."""
    at = np.arange(0.0, seconds, STEP_S)
    rates = mean - swing * np.cos(2 * np.pi * (at + 0.5 * STEP_S) / period_s)
    return pieces(*zip(at.tolist(), rates.tolist(), strict=True))


def ramp(low: float, high: float, begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """Return the pieces of a rate that changes along a line."""
    at = np.arange(begin_s, end_s, STEP_S)
    rates = low + (high - low) * (at + 0.5 * STEP_S - begin_s) / (end_s - begin_s)
    return list(zip(at.tolist(), rates.tolist(), strict=True))


def _mixed(lengths: Sequence[RequestLengths], rates: Sequence[float]) -> RequestMix:
    """Return the mix of parts that arrive at these rates."""
    weights = np.array(rates) / max(sum(rates), 1e-9)
    low, high = np.array([part.input for part in lengths], dtype=float).T
    isl = float(weights @ (0.5 * (low + high)))
    square = float(weights @ ((low**2 + low * high + high**2) / 3))
    osl = float(weights @ np.array([0.5 * sum(part.output) for part in lengths]))
    return RequestMix(isl, osl, 0.0, max(square / isl**2 - 1.0, 0.0))


def _trace_demand(loop: OpenLoop, steps: int) -> Demand:
    times = np.array([session.start_ns for session in loop.sessions]) / SECOND
    counts = np.histogram(times, steps, (0.0, steps * STEP_S))[0].astype(float)
    width = round(SMOOTHED_S / STEP_S)
    smooth = np.convolve(np.pad(counts, width // 2, mode="edge"), np.ones(width) / width, "valid")
    specs = [session.requests[0] for session in loop.sessions]
    isl = np.array([spec.prompt_tokens for spec in specs], dtype=float)
    osl = float(np.mean([spec.output_tokens for spec in specs]))
    mix = RequestMix(float(isl.mean()), osl, 0.0, float(isl.var() / isl.mean() ** 2))
    return Demand(smooth / STEP_S, (mix,) * steps)
