"""Stall: what a prompt takes from the streams of the worker that computes it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel

Numbers = NDArray[np.float64]

#: Variance of a sample of ITL, relative to its square.
NOISE = 0.01
#: Samples are forgotten by half after so many more.
_HALF_LIFE = 128.0
#: Most rounds of coordinate descent; three unknowns are settled before, as a rule.
_ROUNDS = 50


class Stall:
    """Least squares of ITL over prompts, with forgetting and a prior.

        itl / f(n) = c + base p + token u

    p prompts of u uncached tokens in all were computed in a time of k steps, each a p-th and
    u-th of k f(n). c takes up an error in the level of f, so that it is not blamed on prompts.
    All are at least 0. The prior is normal: c is about 1, with the variance of a sample; a prompt
    takes nothing apart from its tokens, and each of those what a token of one more stream takes,
    with what they take alone as standard deviations. (Chunks of a prompt take no longer in a step
    of streams than alone, and far less where reading the weights is what takes long. Who thinks
    them dear never tries, and so never learns.) Ridge regression (Hoerl and Kennard, 1970) is the
    mode of this.
    """

    def __init__(self) -> None:
        self._gram = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._keep = 0.5 ** (1.0 / _HALF_LIFE)

    def observe(self, ratio: float, prompts: float, tokens: float) -> None:
        """Take in a sample: ITL over the law's, and prompts and tokens by k f(n) seconds.

        Its deviation is a tenth of itself: where prompts take most of the time, it is large.
        """
        sure = 1.0 / max(1.0, ratio)
        row = sure, sure * prompts, sure * tokens
        _add(self._gram, self._moment, self._keep, sure * ratio, row)

    def law(self, base: float, token: float, stream: float) -> tuple[float, float]:
        """Return seconds a prompt and seconds a token.

        Args:
            base: seconds that a prompt takes alone, apart from its tokens.
            token: seconds of each uncached token.
            stream: seconds by which one stream more makes a step longer.
        """
        return _solve(self._gram, self._moment, base, token, stream)

    def doubt(self, base: float, token: float) -> Callable[[float, float], float]:
        """Return a function: of prompts and tokens to the variance of what they are taken for.

        The posterior's, in seconds^2; `base` and `token` are those of `law`.
        """
        pp, pu, uu = _doubt(self._gram, base, token)

        def variance(prompts: float, tokens: float) -> float:
            return float(pp * prompts**2 + 2 * pu * prompts * tokens + uu * tokens**2)

        return variance


@bare_kernel
def _add(
    gram: Numbers, moment: Numbers, keep: float, ratio: float, row: tuple[float, float, float]
) -> None:
    """Add a row to the sums of least squares, which forget the others a little."""
    for i in range(3):
        for j in range(3):
            gram[i, j] = keep * gram[i, j] + row[i] * row[j]
        moment[i] = keep * moment[i] + ratio * row[i]


@bare_kernel
def _doubt(gram: Numbers, base: float, token: float) -> tuple[float, float, float]:
    """Variances of prompts and of tokens, and their covariance between them, by cofactors."""
    at, per = max(base, 1e-12), max(token, 1e-12)
    one = math.sqrt(NOISE)
    a = gram[0, 0] * (one * one) / NOISE + 1.0
    b = gram[0, 1] * (one * at) / NOISE
    c = gram[0, 2] * (one * per) / NOISE
    d = gram[1, 1] * (at * at) / NOISE + 1.0
    e = gram[1, 2] * (at * per) / NOISE
    f = gram[2, 2] * (per * per) / NOISE + 1.0
    whole = a * (d * f - e * e) - b * (b * f - c * e) + c * (b * e - c * d)
    pp, uu = (a * f - c * c) / whole, (a * d - b * b) / whole
    return at * at * pp, at * per * ((b * c - a * e) / whole), per * per * uu


@bare_kernel
def _solve(
    gram: Numbers, moment: Numbers, base: float, token: float, stream: float
) -> tuple[float, float]:
    """Minimise by coordinate descent, in units of the prior's deviations; compiled."""
    at, per = max(base, 1e-12), max(token, 1e-12)
    one = math.sqrt(NOISE)
    scale = (one, at, per)
    prior = (1.0 / one, 0.0, min(token, stream) / per)
    c, p, u = prior
    for _ in range(_ROUNDS):
        before = (c, p, u)
        for i in range(3):
            rest = moment[i] * scale[i] / NOISE + prior[i]
            found = (c, p, u)
            for j in range(3):
                if j != i:
                    rest -= gram[i, j] * (scale[i] * scale[j]) / NOISE * found[j]
            new = max(0.0, rest / (gram[i, i] * (scale[i] * scale[i]) / NOISE + 1.0))
            if i == 0:
                c = new
            elif i == 1:
                p = new
            else:
                u = new
        if before == (c, p, u):
            break
    return p * base, u * token
