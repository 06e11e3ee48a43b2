"""Latency law of a worker: f(n) = a n + b + d / (n_sat - n)^beta (Georgiou 2026, Eq. 8 and 9)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import overload

import numpy as np

from pigou.config import check_bounds, check_fields
from pigou.games import Floats
from pigou.games.regression import (
    HELD_S,
    SEEN,
    SOLVER_ROWS,
    SPREAD,
    SUMS,
    WEIGHT,
    Bank,
    FitArrays,
    bank_over,
    follow_all,
    pick,
)

#: Relative deviation of an observation; scales the prior of `held_s`.
_NOISE = 0.1


@dataclass(frozen=True, slots=True)
class LatencyLaw:
    """Seconds per request with n requests on a worker: a n + b + d / (n_sat - n)^beta.

    Within `floor` of `n_sat`, and past it, the law continues along its tangent: finite, rising and
    convex, as the exact optimum requires. Raises ValueError for a parameter out of range.
    """

    a: float  # seconds a request, at least 0
    b: float  # seconds, at least 0
    d: float = 0.0  # seconds, at least 0; 0 for no pole
    n_sat: float = math.inf  # requests, above 0
    beta: float = 1.0
    floor: float = 1.0  # requests, above 0

    def __post_init__(self) -> None:
        check_fields(self, "a", "b", "d", ge=0)
        check_fields(self, "n_sat", "beta", "floor", gt=0, infinite=True)

    @overload
    def __call__(self, n: float) -> float: ...
    @overload
    def __call__(self, n: Floats) -> Floats: ...
    def __call__(self, n: float | Floats) -> float | Floats:
        """Return seconds per request with `n` requests on the worker."""
        if isinstance(n, float):  # one number at a time is the usual case
            value = self.a * n + self.b
            if self.d:
                gap = self.n_sat - n
                near = max(gap, self.floor)
                slope = self.beta * self.d * near ** (-self.beta - 1.0)
                value = value + self.d * near**-self.beta + (near - gap) * slope
            return float(value)
        n = np.asarray(n, dtype=np.float64)
        values = self.a * n + self.b
        if self.d:
            gaps = self.n_sat - n
            nears = np.maximum(gaps, self.floor)
            slopes = self.beta * self.d * nears ** (-self.beta - 1.0)
            values = values + self.d * nears**-self.beta + (nears - gaps) * slopes
        return float(values) if np.ndim(values) == 0 else values

    def toll(self, n: float) -> float:
        """Return the seconds one more request costs the `n` there: n (f(n+1) - f(n))."""
        return n * (self(n + 1.0) - self(n))


class OnlineFit:
    """Law of one worker, updated online; observations halve in weight after `half_life` more.

    Fits a fixed grid of poles scaled to `n_max` at O(1) an observation, with Tukey's weights
    against a running median. With `doubling` above 0 the law is f(n) + e h, h the tokens all hold;
    e has a normal prior that doubles latencies at h = `doubling`. Raises ValueError for a parameter
    out of range.
    """

    def __init__(self, n_max: float, half_life: float = 512.0, doubling: float = 0.0) -> None:
        check_bounds("n_max", n_max, gt=0)
        check_bounds("half_life", half_life, gt=0)
        check_bounds("doubling", doubling, ge=0)
        self._bank = bank_over(n_max)
        self._keep = 0.5 ** (1.0 / half_life)
        size = len(self._bank.n_sat)
        self._prior = _NOISE * doubling
        self._sums = np.zeros(SUMS)
        self._sums[SPREAD] = 1.0
        self._scratch = np.empty((SOLVER_ROWS + 6 * size, 3))
        self._holds = doubling > 0
        self._poles = self._bank.arrays
        gram, moment = np.zeros((size, 3, 3)), np.zeros((size, 3))
        cross = np.zeros((size if doubling else 0, 3))
        self._fit: FitArrays = (gram, moment, cross, self._sums, self._scratch)
        self._law: LatencyLaw | None = None

    @property
    def weight(self) -> float:
        """Sum of the weights of all observations, after forgetting."""
        return float(self._sums[WEIGHT])

    def observe(self, n: float, seconds: float, weight: float = 1.0, held: float = 0.0) -> None:
        """Add a request's `seconds` among `n` that hold `held` tokens; a sure one weighs 1."""
        self.observe_all(
            *(np.array([value], dtype=np.float64) for value in (n, seconds, weight, held))
        )

    def observe_all(
        self, n: Floats, seconds: Floats, weights: Floats, held: Floats | None = None
    ) -> None:
        """Add observations in order, as `observe` does; shape (n,) each."""
        held = np.zeros(len(n)) if held is None else held
        if held.any() and not self._holds:
            raise ValueError("held is not 0: give `doubling` where requests hold something")
        wrong = follow_all(
            self._poles, n, held, seconds, weights, self._keep, self._prior, self._fit
        )
        self._law = None
        if wrong >= 0:
            raise ValueError(_complaint(n[wrong], seconds[wrong], weights[wrong], held[wrong]))

    def law(self) -> LatencyLaw:
        """Return the current law, nothing held; raises ValueError without observations."""
        if not self._sums[SEEN]:
            raise ValueError("no observations: call observe() first, or start from a fitted law")
        if self._law is None:
            best = pick(self._prior, self._fit)
            self._law = _law(self._bank, best, self._scratch[SOLVER_ROWS + best])
        return self._law

    @property
    def held_s(self) -> float:
        """Seconds that each held token adds (e), as of `law`."""
        if self._sums[SEEN]:
            self.law()
        return float(self._sums[HELD_S])


def _complaint(n: float, seconds: float, weight: float, held: float) -> str:
    if not (held >= 0 and math.isfinite(held)):
        return f"held={held}: give a finite number, 0 or more"
    if not (n >= 0 and seconds > 0 and math.isfinite(n + seconds)):
        return f"n={n}, seconds={seconds}: give n >= 0 and seconds > 0, both finite"
    return f"weight={weight}: give a number above 0, and at most 1"


def _law(bank: Bank, index: int, theta: Floats) -> LatencyLaw:
    a, b, d = (float(x) for x in theta)
    if d == 0.0:
        return LatencyLaw(a, b)
    return LatencyLaw(a, b, d, float(bank.n_sat[index]), float(bank.beta[index]))
