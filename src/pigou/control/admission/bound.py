"""How many streams a worker runs at once, learned where it does not say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pigou.control.messages import LoadReport

#: Streams that a worker is given before it has said anything of itself.
FIRST = 32.0
_LESS = 0.7
_MORE = 1.0 / 16.0


class StreamBound:
    """A bound a worker that does not say its own, by what it reports.

    While a report has requests waiting inside the worker, the bound falls by 30%, but not below
    what runs there. While none waits although the bound is reached, it doubles until the first
    fall, and rises by a sixteenth after. (Additive increase, multiplicative decrease: Chiu and
    Jain 1989.)
    """

    def __init__(self) -> None:
        self._bound: dict[str, float] = {}
        self._fell: set[str] = set()

    def report(self, report: LoadReport, streams: int) -> None:
        """Learn from a report; `streams` were sent there and have not ended."""
        bound = self._bound.get(report.worker, FIRST)
        if report.waiting > 0 and report.running > 0:
            self._fell.add(report.worker)
            bound = max(1.0, float(report.running), _LESS * bound)
        elif report.waiting == 0 and streams >= int(bound):
            bound += max(1.0, _MORE * bound) if report.worker in self._fell else bound
        self._bound[report.worker] = bound

    def of(self, said: NDArray[np.int64], ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the bounds, (workers,): what the workers said, or what was learned."""
        if said.all():
            return said
        learned = np.array([int(self._bound.get(worker, FIRST)) for worker in ids])
        found: NDArray[np.int64] = np.where(said > 0, said, learned)
        return found

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        self._bound.pop(worker, None)
        self._fell.discard(worker)
