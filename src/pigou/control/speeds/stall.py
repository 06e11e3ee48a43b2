"""Stall: what a prompt takes from the streams of the worker that computes it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

#: Variance of a sample of ITL about its law, relative to it.
_VARIANCE = 0.01
#: Samples are forgotten by half after so many more.
_HALF_LIFE = 128.0
#: Rounds of coordinate descent; three unknowns are settled long before.
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
        """Take in a sample: ITL over the law's, and prompts and tokens by k f(n) seconds."""
        row = np.array([1.0, prompts, tokens])
        self._gram = self._keep * self._gram + np.outer(row, row)
        self._moment = self._keep * self._moment + ratio * row

    def law(self, base: float, token: float, stream: float) -> tuple[float, float]:
        """Return seconds a prompt and seconds a token.

        Args:
            base: seconds that a prompt takes alone, apart from its tokens.
            token: seconds of each uncached token.
            stream: seconds by which one stream more makes a step longer.
        """
        prior = np.array([1.0, 0.0, min(token, stream)])
        deviation = np.array([_VARIANCE**0.5, base, token])
        scale = np.maximum(deviation, 1e-12)
        gram = self._gram * np.outer(scale, scale) / _VARIANCE + np.eye(3)
        moment = self._moment * scale / _VARIANCE + prior / scale
        found = prior / scale
        for _ in range(_ROUNDS):
            for i in range(3):
                rest = moment[i] - gram[i] @ found + gram[i, i] * found[i]
                found[i] = max(0.0, rest / gram[i, i])
        return float(found[1] * deviation[1]), float(found[2] * deviation[2])
