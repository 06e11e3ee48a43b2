"""Asks simulated workers to hold what they have cached for others, as the gateway does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from pigou.lifecycle.messages import FetchKV
from pigou.request import Request
from pigou.sim.leg import Trip
from pigou.sim.virtual_clock import Clock, Phase
from pigou.sim.worker import SimWorker
from pigou.sim.worker_spec import Member

#: Told of a fetch, the worker that holds blocks for its trip, under which id, how many, and when.
Lent: TypeAlias = Callable[[Trip, FetchKV, str, str, int, int], None]
#: Told of a fetch of which nothing came, and when.
Missed: TypeAlias = Callable[[Trip, FetchKV, int], None]


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
        missed: Missed,
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

    def ask(self, trip: Trip, fetch: FetchKV, now: int) -> None:
        """Ask a worker for what it has of a trip's prompt."""
        self._number += 1
        name = f"lend-{self._number}"
        job = trip.call.job
        request = Request(name, job.input + trip.call.tokens, 1, trip.hashes)
        member = self._members[fetch.read.worker]

        def reach(at: int) -> None:
            sim = member.sim
            if sim is not None and trip.life.leg == fetch.leg:
                sim.lend(
                    request,
                    lambda blocks, then: self._answer(trip, fetch, sim, name, blocks, then),
                    at,
                )

        number = trip.call.number
        late = now + fetch.wait_ns
        self._clock.at(late, Phase.TICK, number, lambda at: self._late(trip, fetch, at))
        if self._way:
            self._clock.at(now + self._way, Phase.SEND, number, reach)
        else:
            reach(now)

    def _answer(
        self, trip: Trip, fetch: FetchKV, sim: SimWorker, name: str, blocks: int, now: int
    ) -> None:
        if trip.life.leg != fetch.leg:  # it has gone on without, or is over
            if blocks:
                sim.release(name, now)
        elif blocks:
            self.count += 1
            self.tokens += blocks * trip.block_size
            self._lent(trip, fetch, sim.name, name, blocks, now)
        else:
            self._late(trip, fetch, now)

    def _late(self, trip: Trip, fetch: FetchKV, now: int) -> None:
        if trip.life.leg == fetch.leg:
            self.failed += 1
            self._missed(trip, fetch, now)
