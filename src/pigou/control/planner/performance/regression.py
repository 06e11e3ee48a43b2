"""Least squares with coefficients of 0 or more, on samples that are forgotten."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from pigou.games import Floats

#: Samples after which a fit is taken instead of its prior.
MIN_SAMPLES = 5
#: Samples further from the fit than this share of it count for less (Huber 1964).
_HUBER = 0.25


class AffineRegression:
    """y = x . theta with theta >= 0, by least squares of relative residuals that are forgotten.

    Args:
        prior: theta before anything was seen; it counts for a tenth of a sample, so that what the
            samples do not tell apart stays as it is.
        half_life_s: after which a sample counts for half.
    """

    def __init__(self, prior: Floats, half_life_s: float) -> None:
        self._prior = np.asarray(prior, dtype=np.float64)
        self._half_life_s = half_life_s
        self._moments = np.zeros((len(self._prior) + 1,) * 2)
        self._theta = self._prior
        self.samples = 0.0

    @property
    def theta(self) -> Floats:
        """The coefficients, shape of the prior."""
        return self._theta

    def forget(self, seconds: float) -> None:
        """Let so many seconds pass."""
        decay = 0.5 ** (seconds / self._half_life_s)
        self._moments *= decay
        self.samples *= decay

    def add(self, x: Floats, y: float) -> None:
        """Add a sample with y > 0; shape of x as of the prior."""
        weight = 1.0
        if self.samples >= MIN_SAMPLES:
            deviation = abs(float(x @ self._theta) / y - 1.0)
            weight = min(1.0, _HUBER / max(deviation, 1e-12))
        row = np.append(x, y) / y
        self._moments += weight * np.outer(row, row)
        self.samples += 1.0

    def solve(self) -> None:
        """Fit the coefficients to the samples."""
        scale = np.where(self._prior > 0, self._prior, 1.0)
        size = len(self._prior)
        units = np.append(scale, 1.0)
        moments = self._moments * np.outer(units, units)
        anchor = np.column_stack((np.eye(size), self._prior / scale))
        moments = moments + 0.1 / size * anchor.T @ anchor * min(1.0, moments[-1, -1] + 1e-9)
        values, vectors = np.linalg.eigh(moments)
        root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
        solution, _ = nnls(root[:, :size], root[:, size])
        self._theta = solution * scale
