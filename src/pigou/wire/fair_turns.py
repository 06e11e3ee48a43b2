"""Turns of tenants: a few places, or threads, that tenants are given one after another."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from pigou.wire.errors import APIError

_THREADS = 2
#: Maximum queued jobs per tenant; more are answered 429.
_MAX_WAITING = 64
_T = TypeVar("_T")


class FairTurns:
    """Places granted to waiting tenants round-robin. Event loop only."""

    def __init__(self, places: int, max_per_tenant: int | None = None) -> None:
        self._free = places
        self._max_per_tenant = places if max_per_tenant is None else max_per_tenant
        self._taken: Counter[str] = Counter()
        #: Those who wait, by tenant; the tenant whose turn is next comes first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def total_waiting(self) -> int:
        """Those who wait for a place."""
        return sum(map(len, self._waiting.values()))

    def waiting(self, tenant: str) -> int:
        """Return how many of a tenant wait for a place."""
        return len(self._waiting.get(tenant, ()))

    async def take(self, tenant: str) -> None:
        """Wait for a place and take it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(tenant)
            elif turn in queue:
                queue.remove(turn)
                if not queue and self._waiting.get(tenant) is queue:
                    del self._waiting[tenant]
            raise

    def give_back(self, tenant: str) -> None:
        """Give a tenant's place to the next in turn."""
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._free += 1
        self._hand_out()

    def close(self) -> None:
        """Cancel those who wait."""
        for queue in self._waiting.values():
            for turn in queue:
                turn.cancel()

    def _hand_out(self) -> None:
        while self._free:
            below = (name for name in self._waiting if self._taken[name] < self._max_per_tenant)
            if (tenant := next(below, None)) is None:
                return
            queue = self._waiting.pop(tenant)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the other tenants
            if not turn.done():
                self._free -= 1
                self._taken[tenant] += 1
                turn.set_result(None)


class FairThreadPool:
    """Thread pool with fair turns of tenants."""

    def __init__(self, threads: int = _THREADS, max_waiting: int = _MAX_WAITING) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="off-loop")
        self._turns = FairTurns(threads)
        self._max_waiting = max_waiting

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """Run `work` on a thread; raises APIError 429 if too much is queued."""
        if (waiting := self._turns.waiting(tenant)) >= self._max_waiting:
            raise APIError(
                429,
                f"{waiting} large requests with this key wait to be read. Try again later.",
                retry_after=1,
            )
        await self._turns.take(tenant)
        job = asyncio.get_running_loop().run_in_executor(self._pool, work)
        # A thread stays taken until its work ends, also when nobody waits for it any longer.
        job.add_done_callback(partial(self._done, tenant))
        return await asyncio.shield(job)

    def close(self) -> None:
        """End the threads, once their work is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, tenant: str, job: asyncio.Future[_T]) -> None:
        if not job.cancelled():
            job.exception()  # the waiting request may have been cancelled
        self._turns.give_back(tenant)
