"""The watch over one worker that is up: health, load, hangs, KV events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

import aiohttp

from pigou.control.messages import CacheChanged, CacheLost
from pigou.fleet.config import WatchConfig
from pigou.fleet.events import Subscriber
from pigou.fleet.probe import Source, loads
from pigou.gateway.pilot import Pilot
from pigou.gateway.upstream import Upstream
from pigou.request import SECOND
from pigou.wire.kv_events import WireEvent


class Watch:
    """Looks at a worker until it counts as down.

    A worker is down when `/health` fails several times in a row, or when requests are under way
    on it and none has moved for `config.hang` seconds.

    Attributes:
        gaps: times that KV events were missed for good.
    """

    def __init__(self, pilot: Pilot, upstream: Upstream, config: WatchConfig) -> None:
        self._pilot = pilot
        self._upstream = upstream
        self._config = config
        self.gaps = 0

    async def until_down(self, sources: Sequence[Source]) -> str:
        """Return why the worker counts as down, once it does."""
        subscribers = [
            asyncio.create_task(Subscriber(source, self._apply, self._lose).run())
            for source in sources
        ]
        try:
            return await self._look()
        finally:
            for task in subscribers:
                task.cancel()
            await asyncio.gather(*subscribers, return_exceptions=True)

    def _apply(self, events: tuple[WireEvent, ...]) -> None:
        self._pilot.observe(CacheChanged(self._upstream.worker.id, events))

    def _lose(self) -> None:
        self.gaps += 1
        self._pilot.observe(CacheLost(self._upstream.worker.id))

    async def _look(self) -> str:
        config, failures = self._config, 0
        while True:
            await asyncio.sleep(config.every)
            if stuck := self._stuck():
                return stuck
            why = await self._unhealthy()
            failures = failures + 1 if why else 0
            if failures >= config.failures:
                return why
            if not why:
                await self._report()

    def _stuck(self) -> str:
        up, limit = self._upstream, self._config.hang
        still = (time.monotonic_ns() - up.progress) / SECOND
        if limit and up.inflight and still > limit:
            return f"{up.inflight} requests under way, none moved for {still:.0f} s"
        return ""

    async def _unhealthy(self) -> str:
        try:
            status, _ = await self._upstream.get("/health", self._config.timeout)
        except TimeoutError:
            return f"/health did not answer within {self._config.timeout:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"/health: {error or type(error).__name__}"
        return "" if status == 200 else f"/health answered {status}"

    async def _report(self) -> None:
        worker = self._upstream.worker.id
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            status, page = await self._upstream.get("/metrics", self._config.timeout)
            if status == 200:
                self._pilot.observe(loads(page, worker))
