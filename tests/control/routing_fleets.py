"""Small fleets for the laws of routing policies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Request

#: A prompt of 62.5 blocks of 16 tokens.
PROMPT = Request("r", 1000, 100)


def alone(workers: int) -> Candidates:
    """Every worker computes and streams."""
    rows = np.arange(workers, dtype=np.int32)
    return Candidates(np.full(workers, -1, dtype=np.int32), rows)


def pairs(*found: tuple[int, int]) -> Candidates:
    """Pairs (prefill or -1, decode)."""
    array = np.array(found, dtype=np.int32)
    return Candidates(*np.ascontiguousarray(array.T))


def product(prefill: int, workers: int) -> Candidates:
    """Workers below `prefill` compute, the others stream; each stream is offered all ways."""
    decode = range(prefill, workers)
    return pairs(*[(p, d) for p in (-1, *range(prefill)) for d in decode])


def split(prefill: int, workers: int, **columns: Any) -> FleetView:
    """A fleet of `prefill` pure prefill workers, and pure decode workers after them."""
    first = np.arange(workers) < prefill
    return FleetView.of(workers, prefills=first, decodes=~first, **columns)


def cheapest(costs: NDArray[np.float64], candidates: Candidates) -> set[tuple[int, int]]:
    """The pairs of least cost."""
    best = np.flatnonzero(costs == costs.min())
    return {(int(candidates.prefill[i]), int(candidates.decode[i])) for i in best}
