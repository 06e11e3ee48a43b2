"""Tokens of streams on their way to the control plane, without an object for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pigou.sim.gateways import AnyPlane
from pigou.sim.worker_spec import FleetWorker


class TokenReports:
    """Tells the control plane of tokens by arrays that are made once."""

    def __init__(self, plane: AnyPlane) -> None:
        self._plane = plane
        self._slots: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._counts = self._slots.copy()
        self._one_stream = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)

    def add_slots(self, streams: int) -> None:
        """Make room for so many more streams at once."""
        self._slots = np.zeros(len(self._slots) + streams, dtype=np.int64)
        self._counts = self._slots.copy()

    def publish(self, workers: Sequence[FleetWorker], now: int) -> None:
        """Tell of the tokens generated since the last call."""
        slots, counts, size = self._slots, self._counts, 0
        for worker in workers:
            if worker.sim is not None:
                size = worker.sim.publish_tokens(now, slots, counts, size)
        if size:
            self._plane.on_tokens(slots[:size], counts[:size], now)

    def publish_one(self, slot: int, count: int, now: int) -> None:
        """Tell of so many tokens of one stream."""
        slots, counts = self._one_stream
        slots[0], counts[0] = slot, count
        self._plane.on_tokens(slots, counts, now)
