"""The sums of what prompts take from streams, and their solution, compiled.

gram, moment: of least squares over 1, prompts and tokens, (3, 3) and (3,).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined

Numbers = NDArray[np.float64]

#: Variance of a sample of ITL, relative to its square.
NOISE = 0.01
#: Most rounds of coordinate descent; three unknowns are settled before, as a rule.
_ROUNDS = 50


@bare_kernel
def add(
    gram: Numbers, moment: Numbers, keep: float, ratio: float, prompts: float, tokens: float
) -> None:
    """Add a sample to the sums of least squares, which forget the others a little.

    Arguments are those of `Stall.observe`; `keep` is the factor of the sums.
    """
    sure = 1.0 / max(1.0, ratio)
    row = sure, sure * prompts, sure * tokens
    for i in range(3):
        for j in range(3):
            gram[i, j] = keep * gram[i, j] + row[i] * row[j]
        moment[i] = keep * moment[i] + sure * ratio * row[i]


@bare_kernel
def doubt(gram: Numbers, base: float, token: float) -> tuple[float, float, float]:
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


@inlined
def variance(doubt: tuple[float, float, float], prompts: float, tokens: float) -> float:
    """Return the variance of what prompts are taken for, in seconds^2."""
    pp, pu, uu = doubt
    return pp * (prompts * prompts) + 2 * pu * prompts * tokens + uu * (tokens * tokens)


@bare_kernel
def solve(
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
