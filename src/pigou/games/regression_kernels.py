"""The sums of least squares for many poles, and their solution; compiled for `regression`."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

from pigou.compiled import bare_kernel, inlined
from pigou.games.arrays import Floats

RIDGE = 1e-11
#: Pivots below this are of sums that rounding has made singular, in spite of the ridge.
_SINGULAR = 1e-13
#: Of a column that another explains, at least so much is left.
_LEFT = 1e-9
#: Tukey's bisquare: residuals beyond this many standard deviations have no weight.
TUKEY = 4.685
#: How fast the online fit's running median moves: by this share of itself an observation.
MEDIAN_STEP = 0.02
SMALLEST_SCALE = 1e-6
#: What an online fit keeps beside gram and moment: the weighted square of what was observed; the
#: running median of absolute relative residuals; the sum of weights; observations; whether there is
#: a law that residuals are taken from, and its a, b, d, n_sat, beta; weighted product of what was
#: held with what was observed, weighted square of it, and what each that is held takes.
ENERGY, SPREAD, WEIGHT, SEEN, FOLLOWS, A, B, D, N_SAT, BETA, PRODUCT, SQUARE, EACH = range(13)
SUMS = 13
#: A law: a, b, d, n_sat and beta.
Curve: TypeAlias = tuple[float, float, float, float, float]
#: Of sets of parameters that are equally good the smallest is taken: so much is no gain.
_GAIN = 1e-12


@bare_kernel
def add(
    n_sat: Floats, beta: Floats, floor: float, n: float, held: float, seconds: float,
    weight: float, keep: float, gram: Floats, moment: Floats, cross: Floats,
) -> None:  # fmt: skip
    """Take one observation into the sums of every pole; those before count `keep` times as much.

    Args:
        n_sat: of the poles, (poles,); the first has none.
        beta: of the poles, (poles,).
        floor: as of `Bank`.
        n: requests on the worker.
        held: by those.
        seconds: that it took.
        weight: of this observation.
        keep: factor of the sums.
        gram: shape (poles, 3, 3).
        moment: shape (poles, 3).
        cross: moment of what is held, (poles, 3); left alone where it is empty.
    """
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
    """Solve for two unknowns; NaN where they cannot be told apart."""
    ratio = g[j, i] * (1.0 / g[i, i])
    pivot = g[j, j] - ratio * g[i, j]
    if not pivot > _SINGULAR:
        return math.nan, math.nan
    second = (r[j] - ratio * r[i]) / pivot
    return (r[i] - g[i, j] * second) / g[i, i], second


@inlined
def _triple(g: Floats, r: Floats) -> tuple[float, float, float]:
    """Solve for three unknowns, by elimination with partial pivots (the first is no smaller).

    NaN where they cannot be told apart.
    """
    whole = 1.0 / g[0, 0]
    one, two = g[1, 0] * whole, g[2, 0] * whole
    a, b, x = g[1, 1] - one * g[0, 1], g[1, 2] - one * g[0, 2], r[1] - one * r[0]
    c, d, y = g[2, 1] - two * g[0, 1], g[2, 2] - two * g[0, 2], r[2] - two * r[0]
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
    return (r[0] - g[0, 1] * second - g[0, 2] * third) / g[0, 0], second, third


@inlined
def _solved(g: Floats, r: Floats, some: int) -> tuple[float, float, float]:
    """Solve for the unknowns of one of the seven sets; the others are 0."""
    x, y, z = 0.0, 0.0, 0.0
    if some == 0:
        x = r[0] / g[0, 0]
    elif some == 1:
        y = r[1] / g[1, 1]
    elif some == 2:
        z = r[2] / g[2, 2]
    elif some == 3:
        x, y = _pair(g, r, 0, 1)
    elif some == 4:
        x, z = _pair(g, r, 0, 2)
    elif some == 5:
        y, z = _pair(g, r, 1, 2)
    else:
        x, y, z = _triple(g, r)
    return x, y, z


@bare_kernel
def least(gram: Floats, moment: Floats, scratch: Floats, best: Floats, errors: Floats) -> None:
    """Minimise x'Gx - 2 x'm over x >= 0 for each pole, by trying each set of non-zero ones.

    Args:
        gram: shape (poles, 3, 3).
        moment: shape (poles, 3).
        scratch: shape (5, 3), for use here.
        best: takes the minimisers, (poles, 3).
        errors: takes the minima, (poles,).
    """
    g, r, size = scratch[:3], scratch[3], scratch[4]
    for k in range(gram.shape[0]):
        for i in range(3):
            size[i] = np.sqrt(max(gram[k, i, i], 1e-300))
        for i in range(3):
            for j in range(3):
                g[i, j] = gram[k, i, j] / (size[i] * size[j])
            g[i, i] += RIDGE
            r[i] = moment[k, i] / size[i]
        error, known = 0.0, False
        best[k, 0], best[k, 1], best[k, 2] = 0.0, 0.0, 0.0
        for some in range(7):
            x, y, z = _solved(g, r, some)
            if not (x >= 0.0 and y >= 0.0 and z >= 0.0):
                continue
            found = -(x * r[0] + y * r[1] + z * r[2])
            if not known or found < error - _GAIN * abs(found):
                error, known = found, True
                best[k, 0], best[k, 1], best[k, 2] = x / size[0], y / size[1], z / size[2]
        errors[k] = error


@bare_kernel
def worth(line: float, best: float, count: int) -> bool:
    """Whether a pole's three parameters gain as much as Schwarz's criterion asks of them.

    Args:
        line: weighted squared error of the straight line.
        best: that of the pole.
        count: observations.
    """
    gain = count * math.log(max(line, 1e-300) / max(best, 1e-300))
    return gain > 3.0 * math.log(max(count, 2))


@bare_kernel
def _best(gram: Floats, moment: Floats, energy: float, count: int, scratch: Floats) -> int:
    """Return the best pole; arguments as of `pick`, and the weighted square of all."""
    poles = gram.shape[0]
    theta, errors = scratch[5 : 5 + poles], scratch[5 + poles :].reshape(-1)[:poles]
    least(gram, moment, scratch[:5], theta, errors)
    best, found = 0, 0.0
    for k in range(poles):
        error = max(energy + errors[k], 0.0)
        if k == 0 or error < found:
            best, found = k, error
    return best if worth(max(energy + errors[0], 0.0), found, count) else 0


@bare_kernel
def pick(
    gram: Floats, moment: Floats, cross: Floats, prior: float, sums: Floats, scratch: Floats
) -> int:
    """Return the pole that the sums of an online fit speak for, 0 for the straight line.

    Its a, b and d are in `scratch[5 + pole]` then, and what each takes that is held in `sums`. That
    is partialled out of gram and moment, so that all are fitted together (Frisch and Waugh, 1933;
    Lovell, 1963), and left out where it would be negative.

    Args:
        gram: shape (poles, 3, 3).
        moment: shape (poles, 3).
        cross: moment of what is held, (poles, 3); empty where nothing ever is.
        prior: what would double the seconds by being held, at one deviation of a normal prior about
            0, times the relative deviation of an observation.
        sums: as the constants above say, shape (SUMS,).
        scratch: shape (5 + 6 poles, 3), for use here.
    """
    poles, count = gram.shape[0], max(2, int(sums[WEIGHT]))
    sums[EACH] = 0.0
    if sums[SQUARE] > 0.0:
        square = sums[SQUARE] + prior * prior * gram[0, 1, 1] / sums[WEIGHT]
        rest = scratch[5 + 2 * poles : 5 + 5 * poles].reshape((poles, 3, 3))
        target = scratch[5 + 5 * poles : 5 + 6 * poles]
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
            left -= cross[best, i] * scratch[5 + best, i]
        if left > 0.0:
            sums[EACH] = left / square
            return best
    return _best(gram, moment, sums[ENERGY], count, scratch)


@inlined
def curve(law: Curve, n: float, floor: float) -> float:
    """What a law (`LatencyLaw`) says of `n`."""
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
    n_sat: Floats, beta: Floats, floor: float, n: float, held: float, seconds: float, sure: float,
    keep: float, gram: Floats, moment: Floats, cross: Floats, prior: float, sums: Floats,
    scratch: Floats,
) -> None:  # fmt: skip
    """Take one observation into an online fit.

    The law that residuals are taken from is solved anew often at first, then every 16th time.

    Args:
        n_sat, beta, floor, n, held, seconds, keep, gram, moment, cross: as of `add`.
        sure: weight of the observation, above 0 and at most 1.
        prior, sums, scratch: as of `pick`.
    """
    seen = int(sums[SEEN])
    expected = seconds
    if seen > 0:
        if sums[FOLLOWS] == 0.0 or seen < 32 or seen % 16 == 0:
            best = pick(gram, moment, cross, prior, sums, scratch)
            sums[FOLLOWS] = 1.0
            for i in range(3):
                sums[A + i] = scratch[5 + best, i]
            sums[N_SAT], sums[BETA] = n_sat[best], beta[best]
        expected = curve((sums[A], sums[B], sums[D], sums[N_SAT], sums[BETA]), n, floor)
        expected += sums[EACH] * held
    expected = max(expected, SMALLEST_SCALE * seconds)
    residual = (seconds / expected - 1.0) * math.sqrt(sure)
    share = residual / (TUKEY * max(1.4826 * sums[SPREAD], SMALLEST_SCALE))
    near = max(0.0, 1.0 - share * share)
    trust = sure * near * near
    kept = keep**sure
    step = MEDIAN_STEP if abs(residual) > sums[SPREAD] else -MEDIAN_STEP
    sums[SPREAD] = min(max(sums[SPREAD] * math.exp(sure * step), SMALLEST_SCALE), 1e6)
    weight = trust / (expected * expected)
    add(n_sat, beta, floor, n, held, seconds, weight, kept, gram, moment, cross)
    sums[ENERGY] = kept * sums[ENERGY] + weight * (seconds * seconds)
    sums[PRODUCT] = kept * sums[PRODUCT] + weight * (held * seconds)
    sums[SQUARE] = kept * sums[SQUARE] + weight * (held * held)
    sums[WEIGHT] = kept * sums[WEIGHT] + trust
    sums[SEEN] = seen + 1


@bare_kernel
def follow_all(
    n_sat: Floats, beta: Floats, floor: float, n: Floats, held: Floats, seconds: Floats,
    sure: Floats, keep: float, gram: Floats, moment: Floats, cross: Floats, prior: float,
    sums: Floats, scratch: Floats,
) -> int:  # fmt: skip
    """Take several observations into an online fit, as `follow` takes one; (n,) each.

    Nothing may be held where `cross` is empty.

    Returns:
        Index of the first that is none; nothing was taken in from there on. -1 where all are.
    """
    for i in range(n.shape[0]):
        good = n[i] >= 0.0 and seconds[i] > 0.0 and held[i] >= 0.0
        good = good and math.isfinite(n[i] + seconds[i] + held[i])
        if not (good and sure[i] > 0.0 and sure[i] <= 1.0):
            return i
        follow(
            n_sat, beta, floor, n[i], held[i], seconds[i], sure[i], keep, gram, moment, cross,
            prior, sums, scratch,
        )  # fmt: skip
    return -1
