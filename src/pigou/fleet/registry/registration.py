"""Keeps a worker registered: the thin driver of the lease keeper."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from pigou.fleet.registry.entry import WorkerEntry
from pigou.fleet.registry.lease import LeaseAction, LeaseKeeper
from pigou.fleet.registry.registry import EntryConflict, LeaseLost, Registry
from pigou.request import SECOND

_log = logging.getLogger("pigou.registry")

#: Seconds that a call may take, at most; of a short lease a fourth.
_CALL_S = 5.0


class Registration:
    """Keeps one worker registered, whatever the registry does; the worker serves meanwhile.

    Attributes:
        entry: as it is registered, or will be.
        keeper: decides when the registry is called.
    """

    def __init__(
        self,
        registry: Registry,
        entry: WorkerEntry,
        on_change: Callable[[WorkerEntry], None] | None = None,
        keeper: LeaseKeeper | None = None,
    ) -> None:
        """Prepare; `run` registers.

        Args:
            on_change: gets the entry when somebody else has changed its role or state.
            keeper: of its lease; by default one of the entry's time to live.
        """
        self.entry = entry
        self.keeper = keeper or LeaseKeeper(entry.ttl_s, random.getrandbits(32))
        self._registry = registry
        self._on_change = on_change
        self._wake = asyncio.Event()
        self._calls = asyncio.Lock()
        self._call_s = min(_CALL_S, max(entry.ttl_s / 4, 0.1))
        self._why = ""
        self._unwritten: dict[str, object] = {}

    async def run(self) -> None:
        """Keep the worker registered until cancelled."""
        while True:
            self._wake.clear()
            if self._unwritten:
                fields, self._unwritten = self._unwritten, {}
                await self.change(**fields)
            now = time.monotonic_ns()
            step = self.keeper.step(now)
            if step.at_ns > now:
                with suppress(TimeoutError):
                    async with asyncio.timeout((step.at_ns - now) / SECOND):
                        await self._wake.wait()
                continue
            await self._call(step.action)

    async def change(self, **fields: object) -> None:
        """Change fields of the entry, in a new epoch; while the registry is away, later."""
        async with self._calls:
            epoch = self.entry.epoch + 1
            self.entry = msgspec.structs.replace(self.entry, epoch=epoch, **fields)
            if self.keeper.registered:
                try:
                    async with asyncio.timeout(self._call_s):
                        await self._registry.update(self.entry)
                    return
                except (EntryConflict, LeaseLost, TimeoutError, OSError) as error:
                    _log.warning("the registry did not take a change: %s", error or "no answer")
                    self.keeper.lost(time.monotonic_ns())  # to register is to write the change
        self._wake.set()

    async def leave(self) -> None:
        """Remove the entry, if the registry answers; its lease ends by itself otherwise."""
        with suppress(TimeoutError, OSError):
            async with self._calls, asyncio.timeout(self._call_s):
                await self._registry.leave(self.entry)

    async def _call(self, action: LeaseAction) -> None:
        sent = time.monotonic_ns()
        try:
            async with self._calls, asyncio.timeout(self._call_s):
                if action is LeaseAction.REGISTER:
                    entry = await self._registry.register(self.entry)
                else:
                    entry = await self._registry.renew(self.entry)
        except LeaseLost as error:
            self.keeper.lost(time.monotonic_ns())
            self._say(str(error))
        except (EntryConflict, TimeoutError, OSError) as error:
            self.keeper.failed(time.monotonic_ns())
            self._say(str(error) or "it does not answer")
        else:
            self.keeper.succeeded(sent, time.monotonic_ns())
            self._say("")
            self._take(entry)

    def _take(self, entry: WorkerEntry) -> None:
        """Take over what somebody else wrote; what is newer here is written.

        Of two changes in one epoch the registry has the first. That this worker drains is then
        said once more, in the next epoch.
        """
        own = self.entry
        if entry.epoch < own.epoch:  # changed here while the call was under way
            self.keeper.lost(time.monotonic_ns())
        elif entry != own:
            self.entry = entry
            if own.draining and not entry.draining:
                self._unwritten = {"draining": True}
                self._wake.set()
            if self._on_change is not None:
                self._on_change(entry)

    def _say(self, why: str) -> None:
        """Log a change of what the registry says, once."""
        if why and why != self._why:
            _log.warning("%s serves on, and is not renewed: %s", self.entry.identity, why)
        elif self._why and not why:
            _log.info("%s is registered again", self.entry.identity)
        self._why = why
