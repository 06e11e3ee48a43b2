"""What waits inside workers: which of it has waited too long, and which goes elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from pigou.control.state import Load, State
from pigou.request import SECOND

#: A worker that went down is expected back within this time, in nanoseconds.
RETURN_WITHIN = 300 * SECOND
#: After one worker came back, the shares of those still expected are kept for this time at most.
HOLD_SHARES = 30 * SECOND
#: What a worker said of itself holds for this time, in nanoseconds.
REPORT_HOLDS = 15 * SECOND
#: A request waits for no share any more so long before its time is over, in nanoseconds, but for
#: three quarters of the queue timeout in any case.
MARGIN = 3 * SECOND


def unstarted(state: State, worker: str) -> list[Load]:
    """Return the requests at a worker that have no token, those first that were sent first.

    A prompt that another worker has computed is not among those of its decode worker.
    """
    found = [
        load
        for load in state.loads.values()
        if not load.first
        and load.generated == 0
        and (load.prefill == worker or (load.decode == worker and load.prefill is None))
    ]
    return sorted(found, key=lambda load: load.routed)


def waits(state: State, worker: str) -> list[Load]:
    """Return the requests that wait inside a worker: it has not begun them.

    They are the last of those without a token, as many as the worker said that wait, but none of
    those that it may be running. So a prompt that takes long to compute does not wait, nor does a
    reply that is not streamed, whoever else sends requests to the worker.
    """
    row, found = state.row[worker], unstarted(state, worker)
    flowing = sum(
        load.decode == worker and (load.first > 0 or load.generated > 0)
        for load in state.loads.values()
    )
    begun = max(0, int(state.columns.running[row]) - flowing)
    count = min(int(state.columns.waiting[row]), len(found) - begun)
    return found[-count:] if count > 0 else []


def overdue(state: State, before: int) -> Iterator[tuple[Load, str]]:
    """Return the requests that wait inside workers and arrived by `before` (ns), and where."""
    for row in np.flatnonzero(state.columns.waiting > 0).tolist():
        worker = state.ids[row]
        for load in waits(state, worker):
            arrived = min(load.request.arrival or load.routed, load.routed)
            if arrived <= before and not load.request.later:
                yield load, worker


def to_move(state: State, slots: NDArray[np.int64], new: str) -> list[tuple[Load, str]]:
    """Return the requests without a token that a new worker should take over, and from whom.

    Each worker keeps its share of all that is at workers of its kind, in proportion to its slots,
    and the prompt that it computes now. Those that were sent last move.

    Args:
        state: of the workers, the new one among them.
        slots: sequences that each runs at once, (workers,).
        new: id of the worker that came up.
    """
    columns, own = state.columns, state.row[new]
    found: list[tuple[Load, str]] = []
    stages = (
        (columns.decodes, columns.decode_requests),
        (columns.prefills & ~columns.decodes, columns.prefill_requests),
    )
    for pool, held in stages:
        if not pool[own]:
            continue
        total, whole = int(held[pool].sum()), int(slots[pool].sum())
        for row in np.flatnonzero(pool).tolist():
            share = math.ceil(total * int(slots[row]) / whole)
            excess = int(held[row]) - share
            if row == own or excess <= 0:
                continue
            worker = state.ids[row]
            waiting = set(map(id, waits(state, worker)))
            movable = [
                load
                for load in unstarted(state, worker)[1:]
                if not load.handed and (load.prefill == worker or id(load) in waiting)
            ]
            found += [(load, worker) for load in movable[-excess:]]
    return found


class Returning:
    """Workers that went down and are expected back, and the shares that are kept for them.

    While one has come back and others are still expected, each worker is given no more than its
    share of all requests, those at workers and those that wait. So the first that returns does
    not get the whole queue. The time of this is bounded: nobody is refused for it.
    """

    def __init__(self, queue_timeout: int) -> None:
        self._latest = queue_timeout - min(MARGIN, queue_timeout // 4)
        self._hold = min(HOLD_SHARES, self._latest)
        self._away: dict[str, tuple[int, int]] = {}
        self._until = 0

    def __len__(self) -> int:
        return len(self._away)

    def down(self, worker: str, slots: int, now: int) -> None:
        """A worker of so many slots went down; 0 for one that runs no streams."""
        self._away[worker] = slots, now

    def up(self, worker: str, now: int) -> None:
        """A worker is there, known from before or not."""
        known = self._away.pop(worker, None)
        self._forget(now)
        if known is not None and self._away:
            self._until = now + self._hold

    def away(self, now: int) -> Mapping[str, int]:
        """Return the slots of those that are expected back, by id."""
        self._forget(now)
        return {worker: slots for worker, (slots, _) in self._away.items()}

    def shares(
        self, slots: NDArray[np.int64], requests: int, since: int, now: int
    ) -> NDArray[np.int64] | None:
        """Return the most requests that each worker is given, (workers,); None for no bound.

        Args:
            slots: sequences that each runs at once, (workers,).
            requests: at workers, and waiting.
            since: when the request to be sent began to wait, in nanoseconds.
            now: nanoseconds.
        """
        if now >= self._until or not self._away or now - since >= self._latest:
            return None
        expected = sum(self.away(now).values())
        if not expected:
            return None
        whole = int(slots.sum()) + expected
        found: NDArray[np.int64] = np.ceil(requests * slots / whole).astype(np.int64)
        return found

    def _forget(self, now: int) -> None:
        for worker, (_, when) in list(self._away.items()):
            if now - when > RETURN_WITHIN:
                del self._away[worker]
