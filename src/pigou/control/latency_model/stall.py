"""Stall: what a prompt takes from the streams of the worker that computes it."""

from __future__ import annotations

import numpy as np

from pigou.control.latency_model.stall_kernel import add, doubt, solve

#: Samples are forgotten by half after so many more.
_HALF_LIFE = 128.0


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

    Attributes:
        gram, moment: sums (`pigou.control.latency_model.stall_kernel`).
        keep: factor of the sums with each sample.
    """

    def __init__(self) -> None:
        self.gram = np.zeros((3, 3))
        self.moment = np.zeros(3)
        self.keep = 0.5 ** (1.0 / _HALF_LIFE)

    def observe(self, ratio: float, prompts: float, tokens: float) -> None:
        """Take in a sample: ITL over the law's, and prompts and tokens by k f(n) seconds.

        Its deviation is a tenth of itself: where prompts take most of the time, it is large.
        """
        add(self.gram, self.moment, self.keep, ratio, prompts, tokens)

    def law(self, base: float, token: float, stream: float) -> tuple[float, float]:
        """Return seconds a prompt and seconds a token.

        Args:
            base: seconds that a prompt takes alone, apart from its tokens.
            token: seconds of each uncached token.
            stream: seconds by which one stream more makes a step longer.
        """
        return solve(self.gram, self.moment, base, token, stream)

    def doubt(self, base: float, token: float) -> tuple[float, float, float]:
        """Return variances of a prompt and of a token, their covariance between them.

        The posterior's, in seconds^2; `base` and `token` are those of `law`.
        """
        return doubt(self.gram, base, token)
