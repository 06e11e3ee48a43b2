"""Prompts that a pool computes beside its streams, and how unevenly they come.

| symbol | meaning |
|---|---|
| z | seconds that a prompt takes from the streams of its worker |
| N | prompts that come to one worker in a time, in the mean |
| c | workers |
| ca2 | variance of gaps between prompts over their squared mean |

The seconds of a worker's prompts in a time vary by N Var[z] + Var[N] E[z]^2. Workers are served in
turn, nearly: each takes the prompt when it has the least to do. So

    Var[N] = min(N (1 + (ca2 - 1) / c), N ca2 / c + 1 / 6),

what random workers get, or an equal part of all prompts, which is not a whole number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Variance of what one of many servers that are served in turn gets of an exact number.
_IN_TURN = 1.0 / 6.0


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Prompts that a pool computes beside its streams."""

    rate_rps: float = 0.0  # a second
    mean_s: float = 0.0  # seconds that one takes from the streams of its worker
    square_s2: float = 0.0  # mean of their squares
    arrival_scv: float = 1.0  # variance of the gaps between them over their squared mean
    # what those that come together add to the squares; one, or of each class of streams.
    cluster_s2: float | np.ndarray = 0.0

    @property
    def busy(self) -> float:
        """Workers that do nothing else."""
        return self.rate_rps * self.mean_s

    def variance_s2(self, seconds: np.ndarray, workers: int) -> np.ndarray:
        """Return the variance of what one of `workers` workers computes in `seconds` seconds.

        Prompts go to the worker with the least to do: they come to each as to one in turn.
        """
        count = self.rate_rps * seconds / workers
        free = 1.0 + (self.arrival_scv - 1.0) / workers
        counts = np.minimum(count * free, count * self.arrival_scv / workers + _IN_TURN)
        unlike = self.square_s2 - self.mean_s**2 + self.cluster_s2
        variance: np.ndarray = count * unlike + counts * self.mean_s**2
        return variance
