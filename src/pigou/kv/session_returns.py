"""Predicts when agent sessions return, from a decayed histogram of their pauses.

A session is identified by the last block it left, and returns with a prompt that extends it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from pigou.kv.block import keys_of
from pigou.request import SECOND, BlockHashes

#: Maximum of paused sessions; beyond it the oldest are forgotten.
_MAX_SESSIONS = 4096
#: Pauses in bins of 10 ms * 1.5^k.
_BINS, _FIRST, _GROWTH = 48, 0.01, 1.5
#: Decay of a count with each further pause.
_FADE = 0.99


@dataclass(slots=True)
class SessionPause:
    """A paused session."""

    hashes: BlockHashes  # shape (blocks, 2)
    expiry: int  # when the blocks expire, nanoseconds
    since: int  # start of the pause, nanoseconds
    tenant: str = ""


class SessionReturns:
    """Predicts which sessions are due: between the `early` and `late` quantiles of pauses."""

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
        """Number of paused sessions."""
        return len(self._away)

    def on_turn_end(self, hashes: BlockHashes, expiry: int, now: int, tenant: str = "") -> None:
        """Record the end of a session's turn; `hashes` has its blocks, shape (n, 2), n >= 1."""
        key = keys_of(hashes[-1:])[0]
        self._away.pop(key, None)
        self._away[key] = SessionPause(hashes, expiry, now, tenant)
        when = self._quantile(self._early)
        if when is not None and self._returned >= self._likely * (self._returned + self._lost):
            heapq.heappush(self._due, (now + when, now, key))
        if len(self._away) > _MAX_SESSIONS:
            self._away.popitem(last=False)
            self._lost = self._lost * _FADE + 1.0

    def on_request(self, hashes: BlockHashes, now: int) -> None:
        """Record a request's blocks, shape (n, 2), which may be a returning session's."""
        for key in reversed(keys_of(hashes)):
            pause = self._away.pop(key, None)
            if pause is not None:
                self._learn(now - pause.since)
                return

    def due(self, now: int) -> list[SessionPause]:
        """Return the sessions due to return, each once."""
        due_pauses = []
        over = self._quantile(self._late, 1)
        while (due := self.next()) is not None and due <= now:
            pause = self._away[heapq.heappop(self._due)[2]]
            if over is not None and now - pause.since <= over and pause.expiry > now:
                due_pauses.append(pause)
        return due_pauses

    def next(self) -> int | None:
        """Return when the next session is due, in nanoseconds; None for none."""
        while self._due:
            due, since, key = self._due[0]
            pause = self._away.get(key)
            if pause is not None and pause.since == since:
                return due
            heapq.heappop(self._due)  # it returned, or was forgotten
        return None

    def clear(self) -> None:
        """Forget all paused sessions; the histogram stays."""
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
