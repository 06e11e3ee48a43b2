"""Per-worker factors: speed of each worker relative to the fleet's common law."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined
from pigou.request import SECOND, Rehearsed

Numbers: TypeAlias = NDArray[np.float64]
Nanos: TypeAlias = NDArray[np.int64]
#: Fields of `Evidence`: kernels are called with a plain tuple, which costs less to hand over.
EvidenceArrays: TypeAlias = tuple[Numbers, Numbers, Numbers, Nanos]

#: Half-life of a worker's evidence in seconds: a worker that is avoided is tried again.
_HALF_LIFE_S = 60.0
#: An observation moves a mean by at most this much, in logarithms.
_MAX_STEP = 0.5
#: Observations that a mean remembers.
_MEMORY = 64.0
#: Least variance of the logarithm of one observation; its first value is four times that.
_MIN_VARIANCE = 0.01
#: Correlated samples that tell as much as an independent one.
_CORRELATED = 4.0
#: Workers whose startup profiles differ by less, in logarithms, have the same factor: a busy
#: machine measures no better.
_SAME_PROFILE = 0.25


class Evidence(NamedTuple):
    """Evidence of each worker, as kernels read it."""

    weight: Numbers  # observations that it counts for, as of `updated_at`, (workers,)
    mean: Numbers  # mean logarithm of observed over expected seconds, (workers,)
    variance: Numbers
    updated_at: Nanos  # when it was last added to, in nanoseconds, (workers,)


class WorkerFactors:
    """One factor per worker, 1 until there is evidence.

    Exponential mean of log(observed / common law), clipped (Huber), relative to all workers, and
    shrunk by m max(0, 1 - (2 se)^2 / m^2) (James and Stein 1961); se is doubled for correlated
    samples. Evidence ages, so an avoided slow worker is tried again.

        factors = WorkerFactors()
        factors.add_worker()
        factors.observe(0, 1.3, now)  # it took 1.3 times what the common law says
        fleet, by_worker = factors.factors(now)
    """

    def __init__(self) -> None:
        none = np.zeros(0)
        self._evidence = Evidence(none, none, none, np.zeros(0, dtype=np.int64))
        self._scratch = none
        self.arrays: EvidenceArrays = self._evidence[:]

    def add_worker(self) -> None:
        """Add a worker as the last row."""
        fresh = (0.0, 0.0, 4 * _MIN_VARIANCE, 0)
        columns = zip(self._evidence, fresh, strict=True)
        self._set(Evidence._make(np.append(column, value) for column, value in columns))

    def remove_worker(self, row: int) -> None:
        """Remove a worker."""
        self._set(Evidence._make(np.delete(column, row) for column in self._evidence))

    def observe(self, row: int, ratio: float, now: int, trust: float = 1.0) -> None:
        """Add that worker `row` took `ratio` times the common law; `trust` is in (0, 1]."""
        observe(self.arrays, row, ratio, now, trust)

    def factors(self, now: int) -> tuple[float, Numbers]:
        """Return the fleet's factor, and that of each worker relative to it, (workers,)."""
        own = np.empty(len(self._evidence.mean))
        return _write_factors(self.arrays, now, own), own

    def factor(self, row: int, now: int) -> float:
        """Return the factor of worker `row` relative to the fleet's."""
        return factor(self.arrays, row, now, self._scratch)

    def _set(self, evidence: Evidence) -> None:
        self._evidence, self.arrays = evidence, evidence[:]
        self._scratch = np.zeros(len(evidence.mean))


class StartupReference:
    """Seconds per step of each startup measurement, by the first worker that made it."""

    def __init__(self) -> None:
        self._step_s: dict[tuple[int, int], float] = {}

    def ratio(self, measured: Sequence[Rehearsed]) -> float:
        """Return the median ratio of a worker to the first one; 1 if close."""
        ratios = []
        for step in measured:
            step_s = step.seconds / step.steps
            reference_s = self._step_s.setdefault((step.tokens, step.streams), step_s)
            ratios.append(step_s / reference_s)
        ratio = statistics.median(ratios) if ratios else 1.0
        return ratio if abs(math.log(ratio)) >= _SAME_PROFILE else 1.0


# --- kernels ---------------------------------------------------------------------------------


@inlined
def _aged_weight(evidence: Evidence, w: int, now: int) -> float:
    age = max(0, now - evidence.updated_at[w]) / SECOND / _HALF_LIFE_S
    weight: float = evidence.weight[w] * 0.5**age
    return weight


@inlined
def _fleet_level(evidence: Evidence, now: int, weights: Numbers) -> float:
    """Write each worker's weight of evidence; return the log of the fleet's factor."""
    total, weighted = 0.0, 0.0
    for w in range(evidence.mean.shape[0]):
        weights[w] = max(_aged_weight(evidence, w, now), 1e-6)
        total += weights[w]
        weighted += weights[w] * evidence.mean[w]
    return weighted / total if evidence.mean.shape[0] > 0 else 0.0


@inlined
def _shrunk_factor(evidence: Evidence, w: int, level: float, weight: float) -> float:
    offset = evidence.mean[w] - level
    error = _CORRELATED * max(evidence.variance[w], _MIN_VARIANCE) / weight
    return math.exp(offset * max(0.0, 1.0 - error / max(offset * offset, 1e-12)))


@bare_kernel
def _write_factors(arrays: EvidenceArrays, now: int, own: Numbers) -> float:
    """Write the factor of each worker to `own`, (workers,); return the fleet's."""
    evidence = Evidence(*arrays)
    level = _fleet_level(evidence, now, own)
    for w in range(evidence.mean.shape[0]):
        own[w] = _shrunk_factor(evidence, w, level, own[w])
    return math.exp(level)


@bare_kernel
def factor(arrays: EvidenceArrays, w: int, now: int, scratch: Numbers) -> float:
    """Return the factor of worker `w`; `scratch` has shape (workers,)."""
    evidence = Evidence(*arrays)
    level = _fleet_level(evidence, now, scratch)
    return _shrunk_factor(evidence, w, level, scratch[w])


@bare_kernel
def observe(arrays: EvidenceArrays, w: int, ratio: float, now: int, trust: float) -> None:
    """Add that worker `w` took `ratio` times the common law."""
    evidence = Evidence(*arrays)
    weight = min(_MEMORY, _aged_weight(evidence, w, now))
    step = math.log(ratio) - evidence.mean[w]
    clipped = min(max(step, -_MAX_STEP), _MAX_STEP)
    share = trust / (weight + trust)
    evidence.mean[w] += share * clipped
    variance_share = max(share, trust / _MEMORY)
    evidence.variance[w] += variance_share * (trust * clipped * clipped - evidence.variance[w])
    evidence.weight[w] = weight + trust
    evidence.updated_at[w] = now
