"""Scales: how much slower or faster each worker is than the fleet's common law."""

from __future__ import annotations

import numpy as np

from pigou.control.latency_model import scales_kernel as kernels
from pigou.control.latency_model.scales_kernel import Numbers


class Scales:
    """One factor a worker, 1 for those of which nothing sure is known.

    It is the exponential mean of log(observed / common law), robust to outliers (Huber's
    clipping), less that of all workers together, and shrunk to 0 by the positive-part rule of
    James and Stein ("Estimation with Quadratic Loss", 1961): m max(0, 1 - (2 se)^2 / m^2), se
    being its standard error, doubled because samples of the same streams are alike. So chance
    differences between like workers do not send everybody to one of them, real ones count, and a
    worker that looked slow once and gets no requests is forgiven as its evidence ages.

    Attributes:
        weight, mean, variance, at: arrays of `pigou.control.latency_model.scales_kernel`.
    """

    def __init__(self) -> None:
        self.weight = np.zeros(0)
        self.mean = np.zeros(0)
        self.variance = np.zeros(0)
        self.at = np.zeros(0, dtype=np.int64)
        self._own = np.zeros(0)

    def up(self) -> None:
        """A worker joined; its row is the last."""
        self.weight = np.append(self.weight, 0.0)
        self.mean = np.append(self.mean, 0.0)
        self.variance = np.append(self.variance, 4 * kernels.LEAST_VARIANCE)
        self.at = np.append(self.at, 0)
        self._own = np.append(self._own, 0.0)

    def down(self, row: int) -> None:
        """A worker left."""
        for name in ("weight", "mean", "variance", "at", "_own"):
            setattr(self, name, np.delete(getattr(self, name), row))

    def observe(self, row: int, ratio: float, now: int, trust: float = 1.0) -> None:
        """Take in that worker `row` took `ratio` times what the common law says, above 0.

        `trust`, above 0 and at most 1, is how much that tells beside a sure observation.
        """
        kernels.observe(self.weight, self.mean, self.variance, self.at, row, ratio, now, trust)

    def now(self, now: int) -> tuple[float, Numbers]:
        """Return the factor of all together, and that of each worker besides, (workers,)."""
        own = np.empty(len(self.mean))
        return kernels.factors(self.weight, self.mean, self.variance, self.at, now, own), own

    def of(self, row: int, now: int) -> float:
        """Return the factor of worker `row`, besides that of all together."""
        return kernels.factor(self.weight, self.mean, self.variance, self.at, row, now, self._own)
