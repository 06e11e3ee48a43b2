"""Discovers workers: the thin driver of a gateway's view of the registry."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from pigou.background import Background
from pigou.fleet.registry.entry import WorkerEntry
from pigou.fleet.registry.registry import Registry
from pigou.fleet.registry.view import ProbeWanted, RegistryView, ViewEffect
from pigou.gateway.registry_status import RegistryStatus
from pigou.request import SECOND

_log = logging.getLogger("pigou.registry")

#: Seconds that a snapshot may take, and before a watch that ended is begun again.
_RELIST_S, _WATCH_AGAIN_S = 5.0, 1.0


class Discovery:
    """Reads the registry, and tells what follows for the fleet.

    Attributes:
        seen: set once the registry was read for the first time, or failed to answer.
    """

    def __init__(
        self,
        registry: Registry,
        apply: Callable[[ViewEffect], None],
        probe: Callable[[WorkerEntry], Awaitable[bool]],
        view: RegistryView | None = None,
        background: Background | None = None,
    ) -> None:
        """Prepare; `run` reads.

        Args:
            apply: gets the effects of the view, in order, but for probes.
            probe: says whether a worker lives, as that incarnation.
            background: runs the watch.
        """
        self.view = view or RegistryView()
        self.seen = asyncio.Event()
        self._registry = registry
        self._apply = apply
        self._probe = probe
        self._background = background or Background()
        self._wake = asyncio.Event()
        self._probes: set[asyncio.Task[None]] = set()
        self._read_ns: int | None = None

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        watch = self._background.start("registry watch", self._watch)
        try:
            while True:
                self._wake.clear()
                now = time.monotonic_ns()
                if self.view.relist_due(now):
                    await self._relist()
                self._handle(self.view.probes(time.monotonic_ns()))
                wait_s = max(0, self.view.next_ns() - time.monotonic_ns()) / SECOND
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
        finally:
            tasks = (watch, *self._probes)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def status(self) -> RegistryStatus:
        """Return what is shown of the registry."""
        view, read_ns = self.view, self._read_ns
        age_s = None if read_ns is None else round((time.monotonic_ns() - read_ns) / SECOND, 3)
        return RegistryStatus(
            stale=view.stale, why=view.why_stale, age_s=age_s, entries=len(view.entries),
            suspects=[str(identity) for identity in view.suspects], ignored=view.ignored,
            outages=view.outages,
        )  # fmt: skip

    def wake(self) -> None:
        """Note that the registry has changed."""
        self.view.wake(time.monotonic_ns())
        self._wake.set()

    async def _watch(self) -> None:
        """Wait for events; a watch that ends is begun anew, and what it missed is read."""
        while True:
            try:
                await self._registry.watch(self.wake)
            except OSError as error:
                _log.info("the registry's watch ended: %s", error)
            self.wake()
            await asyncio.sleep(_WATCH_AGAIN_S)

    async def _relist(self) -> None:
        was_stale = self.view.stale
        try:
            async with asyncio.timeout(_RELIST_S):
                snapshot = await self._registry.relist()
        except (TimeoutError, OSError) as error:
            why = str(error) or f"it did not answer within {_RELIST_S:g} s"
            self.view.unavailable(time.monotonic_ns(), why)
            if not was_stale or not self.seen.is_set():
                _log.warning("the registry is away, and the last view is served: %s", why)
        else:
            self._read_ns = time.monotonic_ns()
            if was_stale and self.seen.is_set():
                _log.info("the registry answers")
            self._handle(self.view.snapshot(self._read_ns, snapshot.entries, snapshot.ignored))
        self.seen.set()

    def _handle(self, effects: Iterable[ViewEffect]) -> None:
        for effect in effects:
            if isinstance(effect, ProbeWanted):
                task = asyncio.create_task(self._ask(effect.entry))
                self._probes.add(task)
                task.add_done_callback(self._probes.discard)
                continue
            try:
                self._apply(effect)
            except Exception:  # the effects that follow count, too
                _log.exception("%r could not be applied", effect)

    async def _ask(self, entry: WorkerEntry) -> None:
        try:
            lives = await self._probe(entry)
        except (TimeoutError, OSError):
            lives = False
        self._handle(self.view.probed(time.monotonic_ns(), entry.identity, lives=lives))
        self._wake.set()
