"""Suspect requests: those under which workers die, one after another."""

from __future__ import annotations

from enum import Enum

import msgspec

from pigou.request import SECOND

#: Deaths of workers with the same request under way, after which it is not sent again.
MAX_DEATHS = 2
#: Seconds within which workers that are killed from outside count as killed at once.
SAME_KILL_S = 2
_LONG_AGO_NS = -(2**62)


class WorkerEnd(Enum):
    """How a worker ended.

    CRASHED: of itself: its process failed, its engine died or hung. KILLED: by a signal from
    outside, or stopped by one. LOST: nobody knows. LIVES: it did not end.
    """

    LIVES = "lives"
    CRASHED = "crashed"
    KILLED = "killed"
    LOST = "lost"


class Suspicion(msgspec.Struct, eq=False):
    """Counts the deaths of workers against the request that was under way on them.

    A death from outside says nothing against a request that got tokens until then. Workers that
    are killed at the same time are one death: a request may be sent on in between.

    Example:
        suspicion = Suspicion()
        suspicion.count(frozenset({"a"}), WorkerEnd.CRASHED, progressed=False, now_ns=0)
        suspicion.count(frozenset({"b"}), WorkerEnd.CRASHED, progressed=False, now_ns=5)
        assert suspicion.suspect
    """

    deaths: tuple[str, ...] = ()  # ids of the workers that died with the request under way
    killed_ns: int = _LONG_AGO_NS  # when the last of them was killed from outside

    @property
    def suspect(self) -> bool:
        """True if the request may be what ends workers."""
        return len(self.deaths) >= MAX_DEATHS

    def count(
        self, workers: frozenset[str], end: WorkerEnd, *, progressed: bool, now_ns: int
    ) -> bool:
        """Count that workers failed the request, after tokens or not; True for a death."""
        if end is WorkerEnd.LIVES or (progressed and end is not WorkerEnd.CRASHED):
            return False
        if end is WorkerEnd.KILLED:
            same_kill = now_ns < self.killed_ns + SAME_KILL_S * SECOND
            self.killed_ns = now_ns
            if same_kill:
                return False
        self.deaths += tuple(sorted(workers)) or ("a worker",)
        return True
