"""Non-negative least squares of a latency law for many poles at once, and its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.games import Floats

N_SAT_RATIOS = np.array([0.7, 0.8, 0.9, 1.0, 1.03, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0, 6.0])
BETAS = np.array([0.5, 1.0, 2.0, 3.0])
RIDGE = 1e-11
#: Pivots below this count as singular in spite of the ridge.
_SINGULAR = 1e-13
#: Least share of a column that another may leave unexplained.
_LEFT = 1e-9
#: Tukey's bisquare: residuals beyond this many standard deviations have no weight.
TUKEY = 4.685
#: Relative step of the online fit's running median per observation.
MEDIAN_STEP = 0.02
SMALLEST_SCALE = 1e-6
#: Entry of the straight line, which has no pole.
LINE = 0
#: Columns of a design: the load, 1 and the pole's; their parameters are a, b and d.
LOAD, ONE, POLE = range(3)
#: Sums of an online fit: weighted square of seconds; running median of absolute relative residuals;
#: weights; observations; whether residuals are taken from a law, and its a, b, d, n_sat, beta;
#: weighted product of held tokens and seconds, weighted square of held tokens, and the seconds of
#: each held token.
ENERGY, SPREAD, WEIGHT, SEEN, FOLLOWS, A, B, D, N_SAT, BETA, PRODUCT, SQUARE, HELD_S = range(13)
SUMS = 13
#: Rows of scratch that `minimise_all` uses; an online fit has each pole's parameters after them.
SOLVER_ROWS = 5
#: A law: a, b, d, n_sat and beta.
LawParameters: TypeAlias = tuple[float, float, float, float, float]
#: Poles: n_sat and beta, (poles,) each, the first of a straight line; and the floor of a `Bank`.
PoleArrays: TypeAlias = tuple[Floats, Floats, float]
#: An online fit: gram (poles, 3, 3), moment (poles, 3), cross (poles, 3; moment of what is held,
#: empty where nothing is), sums (SUMS,), scratch (SOLVER_ROWS + 6 poles, 3).
FitArrays: TypeAlias = tuple[Floats, Floats, Floats, Floats, Floats]
#: Least relative gain by which a later set of parameters wins.
_GAIN = 1e-12


@dataclass(frozen=True, slots=True)
class Bank:
    """Poles to try: `n_sat` and `beta` of shape (poles,); entry 0 is the straight line."""

    n_sat: Floats
    beta: Floats
    floor: float = 1.0

    @property
    def arrays(self) -> PoleArrays:
        """The poles as kernel arguments."""
        return self.n_sat, self.beta, self.floor


def bank_over(n_max: float) -> Bank:
    """Return the poles to try for loads up to `n_max`."""
    n_sat, beta = np.meshgrid(n_max * N_SAT_RATIOS + 0.5, BETAS)
    return Bank(np.append(np.inf, n_sat.ravel()), np.append(1.0, beta.ravel()))


@bare_kernel
def add(
    poles: PoleArrays, n: float, held: float, seconds: float, weight: float, keep: float,
    fit: FitArrays,
) -> None:  # fmt: skip
    """Scale each pole's sums by `keep`, then add one observation with `n` requests."""
    n_sat, beta, floor = poles
    gram, moment, cross, _, _ = fit
    for k in range(n_sat.shape[0]):
        pole = 0.0
        if k > 0:
            gap = n_sat[k] - n
            near = max(gap, floor)
            pole = near ** -beta[k] * (1.0 + (near - gap) * beta[k] / near)
        row = (n, 1.0, pole)
        for i in range(3):
            for j in range(3):
                gram[k, i, j] = gram[k, i, j] * keep + weight * row[i] * row[j]
            moment[k, i] = moment[k, i] * keep + weight * seconds * row[i]
            if cross.shape[0]:
                cross[k, i] = cross[k, i] * keep + weight * held * row[i]


@inlined
def _pair(g: Floats, r: Floats, i: int, j: int) -> tuple[float, float]:
    """Solve for two unknowns; NaN if singular."""
    ratio = g[j, i] * (1.0 / g[i, i])
    pivot = g[j, j] - ratio * g[i, j]
    if not pivot > _SINGULAR:
        return math.nan, math.nan
    second = (r[j] - ratio * r[i]) / pivot
    return (r[i] - g[i, j] * second) / g[i, i], second


@inlined
def _triple(g: Floats, r: Floats) -> tuple[float, float, float]:
    """Solve for three unknowns by elimination with partial pivots; NaN if singular."""
    whole = 1.0 / g[LOAD, LOAD]
    one, two = g[ONE, LOAD] * whole, g[POLE, LOAD] * whole
    a, b, x = (
        g[ONE, ONE] - one * g[LOAD, ONE],
        g[ONE, POLE] - one * g[LOAD, POLE],
        r[ONE] - one * r[LOAD],
    )
    c, d, y = (
        g[POLE, ONE] - two * g[LOAD, ONE],
        g[POLE, POLE] - two * g[LOAD, POLE],
        r[POLE] - two * r[LOAD],
    )
    if abs(c) > abs(a):
        a, b, x, c, d, y = c, d, y, a, b, x
    if abs(a) <= _SINGULAR:
        return math.nan, math.nan, math.nan
    ratio = c * (1.0 / a)
    pivot = d - ratio * b
    if abs(pivot) <= _SINGULAR:
        return math.nan, math.nan, math.nan
    third = (y - ratio * x) / pivot
    second = (x - b * third) / a
    return (r[LOAD] - g[LOAD, ONE] * second - g[LOAD, POLE] * third) / g[LOAD, LOAD], second, third


@inlined
def _solved(g: Floats, r: Floats, subset: int) -> tuple[float, float, float]:
    x, y, z = 0.0, 0.0, 0.0
    if subset == 0:
        x = r[LOAD] / g[LOAD, LOAD]
    elif subset == 1:
        y = r[ONE] / g[ONE, ONE]
    elif subset == 2:
        z = r[POLE] / g[POLE, POLE]
    elif subset == 3:
        x, y = _pair(g, r, LOAD, ONE)
    elif subset == 4:
        x, z = _pair(g, r, LOAD, POLE)
    elif subset == 5:
        y, z = _pair(g, r, ONE, POLE)
    else:
        x, y, z = _triple(g, r)
    return x, y, z


@bare_kernel
def minimise_all(
    gram: Floats, moment: Floats, scratch: Floats, best: Floats, errors: Floats
) -> None:
    """Minimise x'Gx - 2 x'm over x >= 0, for gram (poles, 3, 3) and moment (poles, 3).

    Tries each set of non-zero unknowns. `scratch` is (5, 3); `best` takes (poles, 3), `errors`
    (poles,).
    """
    g, r, size = scratch[:3], scratch[3], scratch[4]  # per column of a design
    for k in range(gram.shape[0]):
        for i in range(3):
            size[i] = np.sqrt(max(gram[k, i, i], 1e-300))
        for i in range(3):
            for j in range(3):
                g[i, j] = gram[k, i, j] / (size[i] * size[j])
            g[i, i] += RIDGE
            r[i] = moment[k, i] / size[i]
        error, known = 0.0, False
        best[k, LOAD], best[k, ONE], best[k, POLE] = 0.0, 0.0, 0.0
        for subset in range(7):
            x, y, z = _solved(g, r, subset)
            if not (x >= 0.0 and y >= 0.0 and z >= 0.0):
                continue
            minimum = -(x * r[LOAD] + y * r[ONE] + z * r[POLE])
            if not known or minimum < error - _GAIN * abs(minimum):
                error, known = minimum, True
                best[k, LOAD] = x / size[LOAD]
                best[k, ONE] = y / size[ONE]
                best[k, POLE] = z / size[POLE]
        errors[k] = error


@bare_kernel
def is_pole_better(line: float, best: float, count: int) -> bool:
    """True if a pole beats the straight line's error `line` by Schwarz's criterion."""
    gain = count * math.log(max(line, 1e-300) / max(best, 1e-300))
    return gain > 3.0 * math.log(max(count, 2))


@bare_kernel
def _best(gram: Floats, moment: Floats, energy: float, count: int, scratch: Floats) -> int:
    poles = gram.shape[0]
    first, last = SOLVER_ROWS, SOLVER_ROWS + poles
    theta, errors = scratch[first:last], scratch[last:].reshape(-1)[:poles]
    minimise_all(gram, moment, scratch[:first], theta, errors)
    best, lowest = 0, 0.0
    for k in range(poles):
        error = max(energy + errors[k], 0.0)
        if k == 0 or error < lowest:
            best, lowest = k, error
    return best if is_pole_better(max(energy + errors[0], 0.0), lowest, count) else 0


@bare_kernel
def pick(prior: float, fit: FitArrays) -> int:
    """Return the best pole of an online fit, 0 for the straight line; parameters are in `fit`.

    `prior` is the tokens that double the seconds at one deviation, times the relative noise. Held
    tokens are partialled out (Frisch and Waugh 1933; Lovell 1963).
    """
    gram, moment, cross, sums, scratch = fit
    poles, count = gram.shape[0], max(2, int(sums[WEIGHT]))
    sums[HELD_S] = 0.0
    if sums[SQUARE] > 0.0:
        square = sums[SQUARE] + prior * prior * gram[LINE, ONE, ONE] / sums[WEIGHT]
        first, last = SOLVER_ROWS + 2 * poles, SOLVER_ROWS + 5 * poles
        rest, target = scratch[first:last].reshape((poles, 3, 3)), scratch[last : last + poles]
        for k in range(poles):
            for i in range(3):
                for j in range(3):
                    rest[k, i, j] = gram[k, i, j] - cross[k, i] * cross[k, j] / square
                rest[k, i, i] = max(rest[k, i, i], _LEFT * gram[k, i, i])
                target[k, i] = moment[k, i] - cross[k, i] * sums[PRODUCT] / square
        energy = sums[ENERGY] - sums[PRODUCT] * sums[PRODUCT] / square
        best = _best(rest, target, energy, count, scratch)
        left = sums[PRODUCT]
        for i in range(3):
            left -= cross[best, i] * scratch[SOLVER_ROWS + best, i]
        if left > 0.0:
            sums[HELD_S] = left / square
            return best
    return _best(gram, moment, sums[ENERGY], count, scratch)


@inlined
def curve(law: LawParameters, n: float, floor: float) -> float:
    """Return a law's seconds (`LatencyLaw`) at a load of `n`."""
    a, b, d, n_sat, beta = law
    value = a * n + b
    if d != 0.0:
        gap = n_sat - n
        near = max(gap, floor)
        slope = beta * d * near ** (-beta - 1.0)
        value = value + d * near**-beta + (near - gap) * slope
    return value


@bare_kernel
def follow(
    poles: PoleArrays, n: float, held: float, seconds: float, sure: float, keep: float,
    prior: float, fit: FitArrays,
) -> None:  # fmt: skip
    """Add one observation of weight `sure` (above 0, at most 1) to an online fit."""
    n_sat, beta, floor = poles
    _, _, _, sums, scratch = fit
    seen = int(sums[SEEN])
    expected = seconds
    if seen > 0:
        if sums[FOLLOWS] == 0.0 or seen < 32 or seen % 16 == 0:
            best = pick(prior, fit)
            sums[FOLLOWS] = 1.0
            for i in range(3):
                sums[A + i] = scratch[SOLVER_ROWS + best, i]
            sums[N_SAT], sums[BETA] = n_sat[best], beta[best]
        expected = curve((sums[A], sums[B], sums[D], sums[N_SAT], sums[BETA]), n, floor)
        expected += sums[HELD_S] * held
    expected = max(expected, SMALLEST_SCALE * seconds)
    residual = (seconds / expected - 1.0) * math.sqrt(sure)
    share = residual / (TUKEY * max(1.4826 * sums[SPREAD], SMALLEST_SCALE))
    near = max(0.0, 1.0 - share * share)
    trust = sure * near * near
    forget = keep**sure
    step = MEDIAN_STEP if abs(residual) > sums[SPREAD] else -MEDIAN_STEP
    sums[SPREAD] = min(max(sums[SPREAD] * math.exp(sure * step), SMALLEST_SCALE), 1e6)
    weight = trust / (expected * expected)
    add(poles, n, held, seconds, weight, forget, fit)
    sums[ENERGY] = forget * sums[ENERGY] + weight * (seconds * seconds)
    sums[PRODUCT] = forget * sums[PRODUCT] + weight * (held * seconds)
    sums[SQUARE] = forget * sums[SQUARE] + weight * (held * held)
    sums[WEIGHT] = forget * sums[WEIGHT] + trust
    sums[SEEN] = seen + 1


@bare_kernel
def follow_all(
    poles: PoleArrays, n: Floats, held: Floats, seconds: Floats, sure: Floats, keep: float,
    prior: float, fit: FitArrays,
) -> int:  # fmt: skip
    """Add valid observations (n,) up to the first invalid one; return its index, or -1."""
    for i in range(n.shape[0]):
        good = n[i] >= 0.0 and seconds[i] > 0.0 and held[i] >= 0.0
        good = good and math.isfinite(n[i] + seconds[i] + held[i])
        if not (good and sure[i] > 0.0 and sure[i] <= 1.0):
            return i
        follow(poles, n[i], held[i], seconds[i], sure[i], keep, prior, fit)
    return -1
