"""Long work of requests, off the event loop: few threads, shared fairly among tenants."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pigou.wire.errors import APIError

_THREADS = 2
#: Pieces of work of one tenant that may wait; more are answered 429.
_MOST_WAITING = 64
_T = TypeVar("_T")


class OffLoop:
    """Runs work on threads; tenants that wait take turns."""

    def __init__(self, threads: int = _THREADS, most_waiting: int = _MOST_WAITING) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="off-loop")
        self._free = threads
        self._most = most_waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """Return what `work` returns, called on a thread.

        Raises:
            APIError: 429, too much of this tenant waits already. Whatever `work` raises.
        """
        await self._take(tenant)
        job = asyncio.get_running_loop().run_in_executor(self._pool, work)
        # A thread stays taken until its work ends, also when nobody waits for it any longer.
        job.add_done_callback(self._done)
        return await asyncio.shield(job)

    def close(self) -> None:
        """End the threads, once their work is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _take(self, tenant: str) -> None:
        if self._free:
            self._free -= 1
            return
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= self._most:
            raise APIError(
                429,
                f"{len(queue)} large requests with this key wait to be read. Try again later.",
                retry_after=1,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()
            else:
                self._forget(tenant, turn)
            raise

    def _done(self, job: asyncio.Future[_T]) -> None:
        if not job.cancelled():
            job.exception()  # whoever waited may have left
        self._give_back()

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[tenant]

    def _give_back(self) -> None:
        """Give a thread to the tenant whose turn it is."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the other tenants
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
