"""Drain of a worker: nothing new is routed to it; its streams finish or migrate."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp

from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.proxy.upstream import Upstream
from pigou.wire.metrics_text import totals

_log = logging.getLogger("pigou.fleet")

#: Seconds between two checks of a draining worker.
_LOOK_S = 0.05
#: Timeout in seconds for a worker's report of held KV.
_TIMEOUT_S = 1.0
#: Seconds within which migrated requests must have left.
_LEAVE_S = 5.0
_HELD = b"pigou_kv_requests_held"


class Drain:
    """Waits until a worker has no request and holds no KV; after the limit its streams migrate."""

    def __init__(
        self, plane_driver: PlaneDriver, worker: str, limit_s: float, *, stops: bool
    ) -> None:
        self.stops = stops
        self._plane_driver = plane_driver
        self._worker = worker
        self._upstream = plane_driver.upstreams.get(worker)
        self._limit_s = limit_s
        self._over_s = time.monotonic() + limit_s

    def limit(self, limit_s: float) -> None:
        """Set the seconds left for its requests."""
        self._limit_s = limit_s
        self._over_s = time.monotonic() + limit_s

    async def run(self) -> None:
        """Wait until the worker is drained, is gone, or its requests were sent away."""
        upstream = self._upstream
        if upstream is None:
            return
        while self._is_there(upstream) and time.monotonic() < self._over_s:
            if self._is_idle(upstream) and not await self._holds(upstream):
                return
            await asyncio.sleep(_LOOK_S)
        leave_s = time.monotonic() + _LEAVE_S
        sent = 0
        while self._is_there(upstream) and time.monotonic() < leave_s:
            sent += upstream.send_away()
            if self._is_idle(upstream):
                break
            await asyncio.sleep(_LOOK_S)
        if sent:
            _log.warning(
                "%s: the drain of %g s is over, and %d requests go on elsewhere",
                self._worker, self._limit_s, sent,
            )  # fmt: skip

    def _is_there(self, upstream: Upstream) -> bool:
        return self._plane_driver.upstreams.get(self._worker) is upstream

    def _is_idle(self, upstream: Upstream) -> bool:
        state = self._plane_driver.plane.state
        return state.is_drained(self._worker) and not upstream.inflight

    async def _holds(self, upstream: Upstream) -> bool:
        """Whether it reports blocks held for other workers."""
        if not self.stops:
            return False
        try:
            status, page = await upstream.get("/metrics", _TIMEOUT_S)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return True
        return status == 200 and totals(page, (_HELD,)).get(_HELD, 0.0) > 0
