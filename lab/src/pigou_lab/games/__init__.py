"""Games that the theory is shown on: congestion, routing, caching and allocation."""

from __future__ import annotations

#: Two costs closer than this, relative to the larger, count as equal.
TOLERANCE = 1e-9


def improves(new: float, old: float) -> bool:
    """Whether ``new`` is lower than ``old`` by more than rounding."""
    if old == new:  # also two infinities
        return False
    return old - new > TOLERANCE * max(1.0, abs(new), abs(old) if old < float("inf") else 1.0)
