"""Predicts when sessions return: an agent's session pauses while its tool works.

A session is known by the last block that it left. It returns with a request whose prompt
continues from there; the time between is one of its pauses. Pauses are counted in bins that
grow by half, with counts that fade, so that the prediction follows what sessions do now.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from pigou.kv.block import keys_of
from pigou.request import SECOND, BlockHashes

#: Maximum of sessions that are awaited; of more, the oldest are forgotten.
_MAX_SESSIONS = 4096
#: Pauses in bins of 10 ms * 1.5^k.
_BINS, _FIRST, _GROWTH = 48, 0.01, 1.5
#: What a count is worth after each further pause.
_FADE = 0.99


@dataclass(slots=True)
class SessionPause:
    """A session that is away."""

    hashes: BlockHashes  # of the blocks that it left, shape (n, 2)
    expiry: int  # until when these are valid, nanoseconds
    since: int  # when it left, nanoseconds


class SessionReturns:
    """Learns the distribution of pauses, and predicts which sessions are due.

    A session is due from when the share `early` of pauses is over until the share `late` is, and
    only if at least the share `likely` of sessions comes back at all.
    """

    def __init__(
        self, early: float = 0.2, late: float = 0.9, likely: float = 0.5, min_pauses: float = 8.0
    ) -> None:
        self.min_pauses = min_pauses
        self._early, self._late, self._likely = early, late, likely
        self._away: OrderedDict[bytes, SessionPause] = OrderedDict()
        self._due: list[tuple[int, int, bytes]] = []  # when, who left when, key
        self._bins = np.zeros(_BINS)
        self._returned = self._lost = 0.0

    @property
    def away(self) -> int:
        """Sessions that are waited for."""
        return len(self._away)

    def on_turn_end(self, hashes: BlockHashes, expiry: int, now: int) -> None:
        """Note that a session ended a turn, and left these blocks, shape (n, 2), at least one."""
        key = keys_of(hashes[-1:])[0]
        self._away.pop(key, None)
        self._away[key] = SessionPause(hashes, expiry, now)
        when = self._quantile(self._early)
        if when is not None and self._returned >= self._likely * (self._returned + self._lost):
            heapq.heappush(self._due, (now + when, now, key))
        if len(self._away) > _MAX_SESSIONS:
            self._away.popitem(last=False)
            self._lost = self._lost * _FADE + 1.0

    def on_request(self, hashes: BlockHashes, now: int) -> None:
        """Note a request with these blocks, shape (n, 2); it may be a session that returns."""
        for key in reversed(keys_of(hashes)):
            pause = self._away.pop(key, None)
            if pause is not None:
                self._learn(now - pause.since)
                return

    def due(self, now: int) -> list[SessionPause]:
        """Return the sessions that are about to come back, each once."""
        due_pauses = []
        over = self._quantile(self._late, 1)
        while (due := self.next()) is not None and due <= now:
            pause = self._away[heapq.heappop(self._due)[2]]
            if over is not None and now - pause.since <= over and pause.expiry > now:
                due_pauses.append(pause)
        return due_pauses

    def next(self) -> int | None:
        """Return when the next session is due, nanoseconds; None when nobody is."""
        while self._due:
            due, since, key = self._due[0]
            pause = self._away.get(key)
            if pause is not None and pause.since == since:
                return due
            heapq.heappop(self._due)  # it has come back, or was forgotten
        return None

    def clear(self) -> None:
        """Wait for nobody any more; what was learned stays."""
        self._away.clear()
        self._due.clear()

    def _learn(self, nanos: int) -> None:
        self._bins *= _FADE
        self._bins[_bin(nanos)] += 1.0
        self._returned = self._returned * _FADE + 1.0
        self._lost *= _FADE

    def _quantile(self, share: float, edge: int = 0) -> int | None:
        total = float(self._bins.sum())
        if total < self.min_pauses:
            return None
        bin_index = int(np.searchsorted(self._bins.cumsum(), share * total))
        return round(_FIRST * _GROWTH ** (min(bin_index, _BINS - 1) + edge) * SECOND)


def _bin(nanos: int) -> int:
    if nanos <= _FIRST * SECOND:
        return 0
    return min(_BINS - 1, int(np.log(nanos / (_FIRST * SECOND)) / np.log(_GROWTH)))
