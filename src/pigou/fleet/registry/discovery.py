"""A gateway's view of the registry, and the driver that reads it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from pigou.background import Background, cancel, wait_for
from pigou.fleet.nats_connection import ReconnectBackoff
from pigou.fleet.registry.entry import Identity, WorkerEntry
from pigou.fleet.registry.registry import Registry
from pigou.gateway.fleet_status import RegistryStatus
from pigou.request import SECOND

_log = logging.getLogger("pigou.registry")
#: Seconds that a snapshot may take, and before a watch that ended is begun again.
_RELIST_S, _WATCH_AGAIN_S = 5.0, 1.0


class ViewConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway reads the registry; all in seconds."""

    relist_s: float = 30.0  # seconds between full snapshots, regardless of events
    coalesce_s: float = 0.5  # minimum seconds between snapshots caused by events
    probe_s: float = 5.0  # seconds between direct probes of a suspect
    # between tries while the registry does not answer.
    backoff: ReconnectBackoff = ReconnectBackoff()


class WorkerRegistered(msgspec.Struct, frozen=True, tag=True):
    """Begin to use a worker."""

    entry: WorkerEntry


class EntryChanged(msgspec.Struct, frozen=True, tag=True):
    """A used worker has a newer epoch: new role, or draining."""

    entry: WorkerEntry


class WorkerSuspected(msgspec.Struct, frozen=True, tag=True):
    """Route nothing new to a worker; its streams continue."""

    identity: Identity
    why: str


class WorkerTrusted(msgspec.Struct, frozen=True, tag=True):
    """A suspect is registered again: send it requests."""

    identity: Identity


class ProbeWanted(msgspec.Struct, frozen=True, tag=True):
    """Ask a suspect itself whether it lives, and answer with `probed`."""

    entry: WorkerEntry


class WorkerDeparted(msgspec.Struct, frozen=True, tag=True):
    """A worker is gone: forget it."""

    identity: Identity
    why: str


ViewEffect = (
    WorkerRegistered | EntryChanged | WorkerSuspected | WorkerTrusted | ProbeWanted | WorkerDeparted
)


class _Known(msgspec.Struct):
    entry: WorkerEntry
    why: str = ""  # why it is suspect; empty if it is not
    probe_ns: int | None = 0  # time of the next probe; None during one


class RegistryView:
    """A gateway's view of the registry; pure: the clock is an argument, effects are returned.

    Level-triggered: each full snapshot is compared with the view. A worker whose entry is gone is
    forgotten once a direct probe fails; while the registry is down, the view stays.
    """

    def __init__(self, config: ViewConfig | None = None, seed: int = 0) -> None:
        self._config = config or ViewConfig()
        self._rng = random.Random(seed)
        self._known: dict[Identity, _Known] = {}
        self._relist_ns = self._last_ns = 0
        self._seen = self._listed_before = False
        self._failures = 0
        self._grace_ns = 0
        self.stale, self.why_stale = True, "it was not read yet"  # while it does not answer
        self.ignored = 0  # records of the last snapshot that were ignored
        self.outages = 0

    @property
    def entries(self) -> tuple[WorkerEntry, ...]:
        """Newest entries of all workers of the view, suspects too."""
        return tuple(known.entry for known in self._known.values())

    @property
    def suspects(self) -> tuple[Identity, ...]:
        """Suspected workers, not routed to."""
        return tuple(identity for identity, known in self._known.items() if known.why)

    def entry(self, identity: Identity) -> WorkerEntry | None:
        """Return the newest entry of a worker; None where it is not in the view."""
        known = self._known.get(identity)
        return None if known is None else known.entry

    # --- time ---------------------------------------------------------------------------------

    def wake(self, now: int) -> None:
        """Note an event of the registry: a snapshot is due, soon after the last one."""
        if self._failures == 0:
            soon_ns = self._last_ns + round(self._config.coalesce_s * SECOND)
            self._relist_ns = min(self._relist_ns, max(now, soon_ns))

    def relist_due(self, now: int) -> bool:
        """Whether a snapshot is wanted now."""
        return now >= self._relist_ns

    def probes(self, now: int) -> list[ViewEffect]:
        """Return due probes, under way until `probed`."""
        wanted: list[ViewEffect] = []
        for known in self._known.values():
            if known.why and known.probe_ns is not None and now >= known.probe_ns:
                known.probe_ns = None
                wanted.append(ProbeWanted(known.entry))
        return wanted

    def next_ns(self) -> int:
        """Return when a snapshot or a probe is due next."""
        probes = (k.probe_ns for k in self._known.values() if k.why and k.probe_ns is not None)
        return min([self._relist_ns, *probes])

    # --- what was seen ------------------------------------------------------------------------

    def unavailable(self, now: int, why: str) -> None:
        """Mark the view stale after a failed read."""
        self._failures += 1
        self.outages += not self.stale
        self.stale, self.why_stale = True, why
        self._relist_ns = now + self._config.backoff.wait_ns(self._failures, self._rng)

    def snapshot(
        self, now: int, entries: Iterable[WorkerEntry], ignored: int = 0
    ) -> list[ViewEffect]:
        """Reconcile with a full snapshot without its `ignored` records; return what follows.

        After an outage, or if all workers vanish at once, workers have one lease to register again.
        """
        listed = {entry.identity: entry for entry in entries}
        missing = [known for identity, known in self._known.items() if identity not in listed]
        trusted = [known.entry.ttl_s for known in self._known.values() if not known.why]
        wiped = self._listed_before and not listed and len(trusted) > 1
        if trusted and (wiped or (self.stale and self._seen)):
            self._grace_ns = now + round(max(trusted) * SECOND)
        self.stale, self.why_stale = False, ""
        self._seen, self._failures, self.ignored = True, 0, ignored
        self._listed_before = bool(listed)
        self._last_ns = now
        self._relist_ns = now + round(self._config.relist_s * SECOND)
        effects = self._listed(listed)
        for known in missing:
            effects += self._missing(known, listed.values(), now)
        return effects

    def probed(self, now: int, identity: Identity, *, lives: bool) -> list[ViewEffect]:
        """Record a direct probe's result; return what follows."""
        known = self._known.get(identity)
        if known is None:
            return []
        known.probe_ns = now + round(self._config.probe_s * SECOND)
        if lives or not known.why:
            return []
        return [self._depart(known, f"{known.why}, and it does not answer")]

    def _listed(self, listed: dict[Identity, WorkerEntry]) -> list[ViewEffect]:
        effects: list[ViewEffect] = []
        for identity, entry in listed.items():
            known = self._known.get(identity)
            if known is None:
                self._known[identity] = _Known(entry)
                effects.append(WorkerRegistered(entry))
                continue
            if known.why:
                known.why = ""
                effects.append(WorkerTrusted(identity))
            if entry.epoch > known.entry.epoch:
                known.entry = entry
                effects.append(EntryChanged(entry))
        return effects

    def _missing(self, known: _Known, listed: Iterable[WorkerEntry], now: int) -> list[ViewEffect]:
        entry = known.entry
        for other in listed:
            if other.worker == entry.worker:
                return [self._depart(known, "it was started again")]
            if other.url == entry.url:
                return [self._depart(known, f"its address is {other.identity}'s now")]
        if known.why:
            return []
        if now < self._grace_ns:
            self._relist_ns = min(self._relist_ns, self._grace_ns)
            return []
        known.why, known.probe_ns = "it is not registered any more", now
        return [WorkerSuspected(entry.identity, known.why)]

    def _depart(self, known: _Known, why: str) -> WorkerDeparted:
        del self._known[known.entry.identity]
        return WorkerDeparted(known.entry.identity, why)


class Discovery:
    """Reads the registry and updates the fleet; `probe` asks a worker directly."""

    def __init__(
        self,
        registry: Registry,
        apply: Callable[[ViewEffect], None],
        probe: Callable[[WorkerEntry], Awaitable[bool]],
        view: RegistryView | None = None,
        background: Background | None = None,
    ) -> None:
        self.view = view or RegistryView()
        self.seen = asyncio.Event()  # it was read once, or failed to answer
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
                await wait_for(self._wake, wait_s)
        finally:
            await cancel(watch, *self._probes)

    def status(self) -> RegistryStatus:
        """Return the registry's status."""
        view, read_ns = self.view, self._read_ns
        age_s = None if read_ns is None else round((time.monotonic_ns() - read_ns) / SECOND, 3)
        return RegistryStatus(
            stale=view.stale, why=view.why_stale, age_s=age_s, entries=len(view.entries),
            suspects=[str(identity) for identity in view.suspects], ignored=view.ignored,
            outages=view.outages,
        )  # fmt: skip

    def wake(self) -> None:
        """Ask for a snapshot."""
        self.view.wake(time.monotonic_ns())
        self._wake.set()

    async def _watch(self) -> None:
        """Watch for events; restart a watch that ends, after a read."""
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
