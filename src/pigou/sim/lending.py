"""Asks simulated workers to hold what they have cached for others, as the gateway does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from pigou.control.messages import Read
from pigou.request import SECOND, Request
from pigou.sim.clock import Clock, Phase
from pigou.sim.leg import Trip
from pigou.sim.member import Member
from pigou.sim.worker import SimWorker

#: As the gateway's: nanoseconds that an answer is waited for at least.
_LEAST_WAIT = SECOND // 20

#: Told of the worker that holds blocks for a trip, under which id, how many, and when.
Lent: TypeAlias = Callable[[Trip, str, str, int, int], None]


class Lending:
    """Questions under way, one a trip.

    An answer is waited for until computing the prompt would have been as quick.

    Attributes:
        count: prompts of which something was held.
        tokens: that were held for them.
        failed: prompts of which nothing came.
    """

    def __init__(
        self, clock: Clock, members: Mapping[str, Member], way: int, lent: Lent,
        missed: Callable[[Trip, int], None],
    ) -> None:  # fmt: skip
        """Prepare to ask.

        Args:
            clock: virtual.
            members: workers by name.
            way: nanoseconds until a question reaches its worker, the answer's way counted in.
            lent: told what is held for a trip.
            missed: told of a trip for which nothing is.
        """
        self.count = self.tokens = self.failed = 0
        self._clock, self._members, self._way = clock, members, way
        self._lent, self._missed = lent, missed
        self._number = 0

    def ask(self, trip: Trip, read: Read, now: int) -> None:
        """Ask a worker for what it has of a trip's prompt."""
        self._number += 1
        name = trip.asked = f"lend-{self._number}"
        job = trip.call.job
        request = Request(name, job.input + trip.call.tokens, 1, trip.hashes)
        member = self._members[read.worker]

        def reach(at: int) -> None:
            sim = member.sim
            if sim is not None and trip.asked == name:
                sim.lend(request, lambda blocks, then: self._answer(trip, sim, name, blocks, then),
                         at)  # fmt: skip

        wait = max(_LEAST_WAIT, round((read.seconds + read.saves) * SECOND))
        number = trip.call.number
        self._clock.at(now + wait, Phase.TICK, number, lambda at: self._late(trip, name, at))
        if self._way:
            self._clock.at(now + self._way, Phase.SEND, number, reach)
        else:
            reach(now)

    def _answer(self, trip: Trip, sim: SimWorker, name: str, blocks: int, now: int) -> None:
        if trip.asked != name:  # it has gone on without, or is over
            if blocks:
                sim.release(name, now)
        elif blocks:
            trip.asked = ""
            self.count += 1
            self.tokens += blocks * trip.block_size
            self._lent(trip, sim.name, name, blocks, now)
        else:
            self._late(trip, name, now)

    def _late(self, trip: Trip, name: str, now: int) -> None:
        if trip.asked == name:
            trip.asked = ""
            self.failed += 1
            self._missed(trip, now)
