"""Suspect requests: workers keep dying under them."""

from __future__ import annotations

from enum import Enum

import msgspec

from pigou.request import SECOND

#: Worker deaths under a request after which it is not retried.
MAX_DEATHS = 2
#: Seconds within which kills from outside count as one.
SAME_KILL_S = 2
_LONG_AGO_NS = -(2**62)


class WorkerEnd(Enum):
    """How a worker ended."""

    LIVES = "lives"  # it did not
    CRASHED = "crashed"  # the process failed, or the engine died or hung
    KILLED = "killed"  # by a signal from outside
    LOST = "lost"  # unknown


class Suspicion(msgspec.Struct, eq=False):
    """Counts worker deaths against the request in flight on them.

    A kill from outside does not count if tokens came until then. Simultaneous kills are one death:
    a request may be retried in between.

    Example:
        suspicion = Suspicion()
        suspicion.count(frozenset({"a"}), WorkerEnd.CRASHED, progressed=False, now_ns=0)
        suspicion.count(frozenset({"b"}), WorkerEnd.CRASHED, progressed=False, now_ns=5)
        assert suspicion.suspect
    """

    deaths: tuple[str, ...] = ()  # ids of workers that died with the request in flight
    killed_ns: int = _LONG_AGO_NS  # last kill from outside

    @property
    def suspect(self) -> bool:
        """True if the request may be killing workers."""
        return len(self.deaths) >= MAX_DEATHS

    def count(
        self, workers: frozenset[str], end: WorkerEnd, *, progressed: bool, now_ns: int
    ) -> bool:
        """Count failed workers; return True for a death. `progressed`: tokens came before."""
        if end is WorkerEnd.LIVES or (progressed and end is not WorkerEnd.CRASHED):
            return False
        if end is WorkerEnd.KILLED:
            same_kill = now_ns < self.killed_ns + SAME_KILL_S * SECOND
            self.killed_ns = now_ns
            if same_kill:
                return False
        self.deaths += tuple(sorted(workers)) or ("a worker",)
        return True
