"""The theory: three games, their equilibria, optima and prices. Pure functions, no clock.

- ``congestion``: who joins which worker, and what that costs the others
- ``latency``: the cost law of a worker, and its fit from observations
- ``caching``: who holds which block, in which tier
- ``allocation``: how many GPUs prefill, how many decode
- ``price_of_anarchy``: observed cost over optimal cost, from a live fleet
- ``queueing``: waits and knees of the textbook queues

``docs/internals/theory.md`` has the results, and the counterexamples to what is commonly claimed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

#: Two costs closer than this, relative to the larger, count as equal.
TOLERANCE = 1e-9


def improves(new: float, old: float) -> bool:
    """Whether ``new`` is lower than ``old`` by more than rounding."""
    if old == new:  # also two infinities
        return False
    return old - new > TOLERANCE * max(1.0, abs(new), abs(old) if old < float("inf") else 1.0)
