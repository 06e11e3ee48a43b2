"""A worker that is slower than its timing model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pigou.request import Nanos
from pigou.sim.moment import varies
from pigou.sim.timing import Batch, Timing


@dataclass(frozen=True, slots=True)
class Slowed:
    """A timing model whose every step takes `factor` times as long."""

    timing: Timing
    factor: float

    @property
    def varies(self) -> bool:
        """Whether it asks for the moments of steps."""
        return varies(self.timing)

    def durations(self, batch: Batch, repeat: int) -> Nanos:
        """Return the nanoseconds of each of `repeat` steps, shape (repeat,)."""
        slow = self.timing.durations(batch, repeat) * self.factor
        found: Nanos = np.maximum(1, np.rint(slow)).astype(np.int64)
        return found
