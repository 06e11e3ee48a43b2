"""The gateway's view of a registry: which workers serve, which are suspect, which are gone."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec

from pigou.fleet.reconnect_backoff import ReconnectBackoff
from pigou.fleet.registry.entry import Identity, WorkerEntry
from pigou.request import SECOND


class ViewConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway reads the registry; all in seconds."""

    relist_s: float = 30.0  # between two full snapshots, whatever events say
    coalesce_s: float = 0.5  # between two snapshots that events ask for, at least
    probe_s: float = 5.0  # between two direct probes of a suspect
    # between tries while the registry does not answer.
    backoff: ReconnectBackoff = ReconnectBackoff()


class WorkerRegistered(msgspec.Struct, frozen=True, tag=True):
    """Begin to use a worker."""

    entry: WorkerEntry


class EntryChanged(msgspec.Struct, frozen=True, tag=True):
    """A worker that is used has a newer epoch: its role, or that it drains."""

    entry: WorkerEntry


class WorkerSuspected(msgspec.Struct, frozen=True, tag=True):
    """Send a worker nothing new; its streams go on."""

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
    """A worker of the view."""

    entry: WorkerEntry
    why: str = ""  # it is suspect; empty while it is not
    probe_ns: int | None = 0  # when it is to be probed next; None while a probe is under way


class RegistryView:
    """What a gateway makes of the registry. Pure: the clock is an argument, effects are returned.

    It is level-triggered: each full snapshot is compared with the view, and events only say that
    a snapshot is worth the while. A worker whose entry is gone is suspect, and is forgotten once
    a direct probe fails. While the registry does not answer, the view stays as it is.

    Attributes:
        stale: the registry does not answer now, or never did.
        why_stale: what it said last; empty while it answers.
        ignored: records of the last snapshot that were no entries of this fleet.
        outages: times that it became stale.
    """

    def __init__(self, config: ViewConfig | None = None, seed: int = 0) -> None:
        """Begin empty and stale; the first snapshot is due at once."""
        self._config = config or ViewConfig()
        self._rng = random.Random(seed)
        self._known: dict[Identity, _Known] = {}
        self._relist_ns = self._last_ns = 0
        self._seen = self._listed_before = False
        self._failures = 0
        self._grace_ns = 0
        self.stale, self.why_stale = True, "it was not read yet"
        self.ignored = self.outages = 0

    @property
    def entries(self) -> tuple[WorkerEntry, ...]:
        """Newest entries of all workers of the view, suspects too."""
        return tuple(known.entry for known in self._known.values())

    @property
    def suspects(self) -> tuple[Identity, ...]:
        """Workers that get nothing new."""
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
        """Return the probes that are due; each is under way until `probed`."""
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
        """Note that the registry did not answer: the view stays, and is stale."""
        self._failures += 1
        self.outages += not self.stale
        self.stale, self.why_stale = True, why
        self._relist_ns = now + self._config.backoff.wait_ns(self._failures, self._rng)

    def snapshot(
        self, now: int, entries: Iterable[WorkerEntry], ignored: int = 0
    ) -> list[ViewEffect]:
        """Reconcile with a full snapshot; return what follows.

        After an outage, and where all workers vanish at once, the leases may have ended with the
        registry's own life. Workers then have one lease's time to register again.

        Args:
            now: when it was read.
            ignored: records that were left out.
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
        """Note what a direct probe said; return what follows."""
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
        """Return what follows for a worker that is not registered any more."""
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
