"""Prefill interference: the seconds a prompt takes from streams on its worker."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel, inlined

Numbers: TypeAlias = NDArray[np.float64]
#: Sums of least squares: products of its regressors (3, 3), and of them with ITL (3,).
SumArrays: TypeAlias = tuple[Numbers, Numbers]

#: Samples that count half.
_HALF_LIFE = 128.0
#: Variance of a sample of ITL, relative to its square.
NOISE = 0.01
#: Most rounds of coordinate descent; three unknowns are settled before, as a rule.
_MAX_ROUNDS = 50
#: Regressors: the level of the law, prompts, and their uncached tokens.
_LEVEL, _PROMPTS, _TOKENS = range(3)


class InterferenceVariance(NamedTuple):
    """Posterior variances in seconds^2: of a prompt, of a token, and their covariance."""

    prompt: float
    covariance: float
    token: float


class PrefillInterference:
    """Least squares of ITL over prompts, with forgetting and a prior (Hoerl and Kennard 1970).

        itl / f(n) = c + base p + token u

    p prompts of u uncached tokens are computed per k f(n) seconds of k steps; c absorbs errors in
    the level of f. The normal prior is that a prompt takes nothing, and a token as much as a token
    of one more stream; standard deviations are their seconds alone.
    """

    def __init__(self) -> None:
        self.arrays: SumArrays = (np.zeros((3, 3)), np.zeros(3))  # sums, for kernels
        self.keep = 0.5 ** (1.0 / _HALF_LIFE)  # factor of the sums with each sample

    def observe(self, ratio: float, prompts: float, tokens: float) -> None:
        """Add a sample: ITL over f(n), and prompts and tokens per k f(n) seconds."""
        add_sample(self.arrays, self.keep, ratio, prompts, tokens)

    def law(self, base: float, token: float, stream: float) -> tuple[float, float]:
        """Return seconds per prompt and per token; arguments are the seconds alone."""
        return _posterior_mode(self.arrays, base, token, stream)

    def variance(self, base: float, token: float) -> InterferenceVariance:
        """Return the posterior variances; arguments as in `law`."""
        return _posterior_variance(self.arrays, base, token)


# --- kernels ---------------------------------------------------------------------------------


@bare_kernel
def add_sample(arrays: SumArrays, keep: float, ratio: float, prompts: float, tokens: float) -> None:
    """Add a sample to the sums, after multiplying them by `keep`."""
    gram, moment = arrays
    weight = 1.0 / max(1.0, ratio)
    row = weight, weight * prompts, weight * tokens
    for i in range(3):
        for j in range(3):
            gram[i, j] = keep * gram[i, j] + row[i] * row[j]
        moment[i] = keep * moment[i] + weight * ratio * row[i]


@bare_kernel
def _posterior_variance(arrays: SumArrays, base: float, token: float) -> InterferenceVariance:
    gram, _ = arrays
    prompt_s, token_s = max(base, 1e-12), max(token, 1e-12)
    one = math.sqrt(NOISE)
    a = gram[_LEVEL, _LEVEL] * (one * one) / NOISE + 1.0
    b = gram[_LEVEL, _PROMPTS] * (one * prompt_s) / NOISE
    c = gram[_LEVEL, _TOKENS] * (one * token_s) / NOISE
    d = gram[_PROMPTS, _PROMPTS] * (prompt_s * prompt_s) / NOISE + 1.0
    e = gram[_PROMPTS, _TOKENS] * (prompt_s * token_s) / NOISE
    f = gram[_TOKENS, _TOKENS] * (token_s * token_s) / NOISE + 1.0
    determinant = a * (d * f - e * e) - b * (b * f - c * e) + c * (b * e - c * d)
    prompt, tokens = (a * f - c * c) / determinant, (a * d - b * b) / determinant
    return InterferenceVariance(
        prompt_s * prompt_s * prompt,
        prompt_s * token_s * ((b * c - a * e) / determinant),
        token_s * token_s * tokens,
    )


@inlined
def interference_variance(variance: InterferenceVariance, prompts: float, tokens: float) -> float:
    """Return the variance of the prefill interference, in seconds^2."""
    return (
        variance.prompt * (prompts * prompts)
        + 2 * variance.covariance * prompts * tokens
        + variance.token * (tokens * tokens)
    )


@bare_kernel
def _posterior_mode(
    arrays: SumArrays, base: float, token: float, stream: float
) -> tuple[float, float]:
    gram, moment = arrays
    prompt_s, token_s = max(base, 1e-12), max(token, 1e-12)
    one = math.sqrt(NOISE)
    scale = (one, prompt_s, token_s)
    prior = (1.0 / one, 0.0, min(token, stream) / token_s)
    level, prompt, tokens = prior
    for _ in range(_MAX_ROUNDS):
        before = (level, prompt, tokens)
        for i in range(3):
            rest = moment[i] * scale[i] / NOISE + prior[i]
            present = (level, prompt, tokens)
            for j in range(3):
                if j != i:
                    rest -= gram[i, j] * (scale[i] * scale[j]) / NOISE * present[j]
            new = max(0.0, rest / (gram[i, i] * (scale[i] * scale[i]) / NOISE + 1.0))
            if i == _LEVEL:
                level = new
            elif i == _PROMPTS:
                prompt = new
            else:
                tokens = new
        if before == (level, prompt, tokens):
            break
    return prompt * base, tokens * token
