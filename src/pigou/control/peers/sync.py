"""Sync of gateways: publishes own changes, and merges those of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pigou.control.admission.budgets import Spending
from pigou.control.messages import PeerGone, PeerReport
from pigou.control.peers.bookings import (
    BOOKED,
    EXPECTED,
    SENT,
    ClassLoad,
    PeerState,
    PredictedPrompt,
    ResendRequest,
    TenantService,
    WorkerBookings,
)
from pigou.control.plane import ControlPlane
from pigou.kv.manifest import Manifest, ManifestEntry
from pigou.request import SECOND, Counts

#: Messages kept for resending; beyond them a snapshot is sent.
BUFFERED = 256
#: Entries of the manifest, and slots of budgets, in one message.
_ENTRIES = 2048
#: Predicted prompts of a snapshot.
_PROMPTS = 256
#: Maximum interval of messages: silence means that a gateway is gone.
HEARTBEAT_NS = SECOND
#: Silence after which a gateway counts as gone.
LEASE_NS = 5 * SECOND
#: Nanoseconds after which missing messages are asked for again.
_RETRY_NS = SECOND // 2
#: Lags after which an answer is overdue.
_LAGS = 3
#: Other gateways that are listened to.
MAX_PEERS = 64


class PeerPublisher:
    """Publishes a ControlPlane's changes as absolute values: later ones repair lost ones."""

    def __init__(self, gateway: str, plane: ControlPlane) -> None:
        self.gateway, self.seq, self.began_at = gateway, 0, 0
        self._plane = plane
        self._ids: tuple[str, ...] = ()
        self._matrix: Counts = np.zeros((len(BOOKED), 0), dtype=np.int64)
        self._workers: dict[str, WorkerBookings] = {}
        self._tenants: dict[str, TenantService] = {}
        self._classes: tuple[ClassLoad, ...] = ()
        self._prompts: deque[PredictedPrompt] = deque(maxlen=_PROMPTS)
        self._sent: deque[tuple[PeerState, int]] = deque(maxlen=BUFFERED)
        self.manifest = Manifest()  # the gateway's, with its changes to be sent
        self.changed: list[ManifestEntry] = []
        #: Use of budgets that others were not told, of about a number of slots; and all of it.
        self.new_spending: Callable[[int], tuple[Spending, ...]] = lambda _: ()
        self.spending: Callable[[], tuple[Spending, ...]] = tuple

    def changes(
        self, now: int, heard: Mapping[str, tuple[int, int]], name: Callable[[str], str] = str
    ) -> PeerState | None:
        """Return changes since the last call or a heartbeat; `name` maps to shared names."""
        workers = self._changed_workers(name)
        services = self._plane.admission.services()
        tenants = tuple(s for s in services if self._tenants.get(s.tenant) != s)
        tenants += self._idle_tenants({service.tenant for service in services})
        predicted = self._plane.predicted
        prompts = tuple(PredictedPrompt(name(p.worker), p.keys) for p in predicted)
        prompts = tuple(prompt for prompt in prompts if prompt.worker)
        predicted.clear()
        manifest = tuple(self.changed)
        self.changed.clear()
        spending, loads = self.new_spending(_ENTRIES), self._plane.admission.class_loads()
        classes = None if loads == self._classes else loads
        self._classes = loads
        due = not self._sent or now - self._sent[-1][1] >= HEARTBEAT_NS
        if not (workers or tenants or prompts or manifest or spending or classes or due):
            return None
        self.seq += 1
        self.began_at = self.began_at or now
        self._workers.update((bookings.worker, bookings) for bookings in workers)
        self._tenants.update((service.tenant, service) for service in tenants)
        self._prompts += prompts
        state = PeerState(
            self.gateway, self.seq, workers, tenants, prompts, dict(heard), manifest,
            spending, classes,
        )  # fmt: skip
        self._sent.append((state, now))
        return state

    def answer(self, request: ResendRequest) -> list[PeerState]:
        """Return the messages that a gateway missed, or a snapshot if they are gone."""
        first = self._sent[0][0].seq if self._sent else 1
        if 0 < first <= request.first <= request.last <= self.seq:
            return [s for s, _ in self._sent if request.first <= s.seq <= request.last]
        workers = tuple(b for b in self._workers.values() if any(b.counts))
        tenants, prompts = tuple(self._tenants.values()), tuple(self._prompts)
        entries, spending = tuple(self.manifest.entries.values()), self.spending()
        return [
            PeerState(
                self.gateway, self.seq, workers, tenants, prompts, classes=self._classes,
                snapshot=True,
            ),
            *(PeerState(self.gateway, self.seq, manifest=entries[first : first + _ENTRIES])
              for first in range(0, len(entries), _ENTRIES)),
            *(PeerState(self.gateway, self.seq, spending=spending[first : first + _ENTRIES])
              for first in range(0, len(spending), _ENTRIES)),
        ]  # fmt: skip

    def farewell(self) -> PeerState:
        """Return the last message, which withdraws this gateway's load."""
        self.seq += 1
        return PeerState(self.gateway, self.seq, leaves=True)

    def age_ns(self, seq: int, now: int) -> int | None:
        """Return the nanoseconds since a message was sent; None if unknown."""
        index = len(self._sent) - 1 - (self.seq - seq)
        return now - self._sent[index][1] if 0 <= index < len(self._sent) else None

    def _changed_workers(self, name: Callable[[str], str]) -> tuple[WorkerBookings, ...]:
        ids, matrix = self._plane.state.ids, own_bookings(self._plane)
        if ids == self._ids:
            rows = np.flatnonzero((matrix != self._matrix).any(axis=0)).tolist()
            gone: set[str] = set()
        else:
            rows = list(range(len(ids)))
            gone = set(self._ids) - set(ids)
        self._ids, self._matrix = ids, matrix
        changed = [WorkerBookings(name(ids[row]), *matrix[:, row].tolist()) for row in rows]
        changed += [WorkerBookings(name(worker)) for worker in gone]
        return tuple(b for b in changed if b.worker and self._workers.get(b.worker) != b)

    def _idle_tenants(self, known: set[str]) -> tuple[TenantService, ...]:
        gone = [service for name, service in self._tenants.items() if name not in known]
        for service in gone:
            del self._tenants[service.tenant]
        return tuple(
            msgspec.structs.replace(service, streams=0, waiting=0)
            for service in gone
            if service.streams or service.waiting
        )


def own_bookings(plane: ControlPlane) -> Counts:
    """Return this gateway's load on each worker, (numbers of `BOOKED`, workers)."""
    state, matrix = plane.state, plane.state.peers.own(plane.state.columns)
    matrix[EXPECTED] = plane.admission.capacity.expected_tokens(state.ids)
    sent = plane.tracker.sent_prompts
    matrix[SENT] = [sent.get(worker, 0) for worker in state.ids]
    return matrix


@dataclass(slots=True)
class PeerFeed:
    """State of another gateway."""

    met_at: int  # time of the first message, nanoseconds
    seen_at: int  # time of the last message
    seq: int = 0  # last message without a gap before it
    ahead: set[int] = field(default_factory=set)  # later messages received
    newest: int = 0  # highest message number
    newest_at: int = 0  # time of that message
    lag_ns: int = 0  # one-way delay: half of the round trip
    # bookings by worker, with the number of their message.
    workers: dict[str, tuple[int, WorkerBookings]] = field(default_factory=dict)
    # service by tenant, with the number of its message.
    tenants: dict[str, tuple[int, TenantService]] = field(default_factory=dict)
    classes_seq: int = 0  # message with the last loads of classes
    asked_at: int = 0  # time of the last resend request; 0 without a gap


class PeerReceiver:
    """Turns messages of other gateways into observations of the ControlPlane.

    Each number keeps its message's sequence number, so order, repetition and loss do not matter in
    the end. A gap is requested once, then a snapshot.
    """

    def __init__(self, publisher: PeerPublisher, lease_ns: int = LEASE_NS) -> None:
        self.peers: dict[str, PeerFeed] = {}
        self.gaps = self.snapshots = 0
        self._publisher, self._lease_ns = publisher, lease_ns

    def heard(self, now: int) -> dict[str, tuple[int, int]]:
        """Return each gateway's last message, by name, and its age in nanoseconds."""
        return {name: (feed.newest, now - feed.newest_at) for name, feed in self.peers.items()}

    @property
    def lag_ns(self) -> int:
        """Maximum age of the other gateways' state."""
        return max((feed.lag_ns for feed in self.peers.values()), default=0)

    def staleness_ns(self, now: int) -> int:
        """Return the age of the oldest gateway's last word."""
        ages = (now - feed.seen_at + feed.lag_ns for feed in self.peers.values())
        return max(ages, default=0)

    def hello(self) -> ResendRequest:
        """Return a new gateway's request for all snapshots."""
        return ResendRequest(self._publisher.gateway)

    def receive(
        self, state: PeerState, now: int
    ) -> tuple[PeerReport | PeerGone | None, ResendRequest | None]:
        """Process a message; return an observation for the plane, and a resend request."""
        name, feed = state.gateway, self.peers.get(state.gateway)
        if name == self._publisher.gateway:
            return None, None
        if state.leaves:
            return (None if self.peers.pop(name, None) is None else PeerGone(name)), None
        if feed is None:
            if len(self.peers) >= MAX_PEERS:
                return None, None
            feed = self.peers[name] = PeerFeed(now, now)
        feed.seen_at = now
        if state.seq > feed.newest:
            feed.newest, feed.newest_at = state.seq, now
        seq, since_ns = state.heard.get(self._publisher.gateway, (-1, 0))
        age_ns = self._publisher.age_ns(seq, now)
        if age_ns is not None:
            feed.lag_ns = max(0, age_ns - since_ns) // 2
        elif self._publisher.began_at and self._publisher.gateway not in state.heard:
            began_at = max(self._publisher.began_at, feed.met_at)
            feed.lag_ns = (now - began_at) // 2  # so old at most: none was answered
        is_new = state.snapshot or (state.seq > feed.seq and state.seq not in feed.ahead)
        report = self._news(state, feed, is_new)
        return report, self._ask(state, feed, now) if is_new else None

    def known(self, worker: str) -> list[PeerReport]:
        """Return all reports on a worker that came up here."""
        return [
            PeerReport(name, (feed.workers[worker][1],))
            for name, feed in self.peers.items()
            if worker in feed.workers
        ]

    def tick(self, now: int) -> tuple[list[PeerGone], list[ResendRequest]]:
        """Return the gateways that fell silent, and repeated resend requests."""
        gone = [n for n, feed in self.peers.items() if now - feed.seen_at > self._lease_ns]
        for name in gone:
            del self.peers[name]
        again = [
            self._request(name, feed, now, again=True)
            for name, feed in self.peers.items()
            if feed.asked_at and now - feed.asked_at >= max(_RETRY_NS, _LAGS * feed.lag_ns)
        ]
        return [PeerGone(name) for name in gone], again

    def _news(self, state: PeerState, feed: PeerFeed, is_new: bool) -> PeerReport | None:
        seq = state.seq
        workers, tenants = list(state.workers), list(state.tenants)
        if state.snapshot:  # workers and tenants left out have nothing
            present = {bookings.worker for bookings in workers}
            workers += [WorkerBookings(name) for name in feed.workers if name not in present]
            served = {service.tenant for service in tenants}
            tenants += [
                msgspec.structs.replace(last, streams=0, waiting=0)
                for name, (_, last) in feed.tenants.items()
                if name not in served
            ]
        workers = [b for b in workers if seq >= feed.workers.get(b.worker, (0,))[0]]
        tenants = [s for s in tenants if seq >= feed.tenants.get(s.tenant, (0,))[0]]
        feed.workers.update((b.worker, (seq, b)) for b in workers)
        feed.tenants.update((s.tenant, (seq, s)) for s in tenants)
        prompts = state.prompts if is_new else ()
        classes = state.classes if seq >= feed.classes_seq else None
        if classes is not None:
            feed.classes_seq = seq
        if not (workers or tenants or prompts or classes):
            return None
        return PeerReport(
            state.gateway, tuple(workers), tuple(tenants), prompts, self.lag_ns, classes
        )

    def _ask(self, state: PeerState, feed: PeerFeed, now: int) -> ResendRequest | None:
        if state.snapshot:
            self.snapshots += 1
            feed.seq = max(feed.seq, state.seq)
        else:
            feed.ahead.add(state.seq)
        feed.ahead = {seq for seq in feed.ahead if seq > feed.seq}
        while feed.seq + 1 in feed.ahead:
            feed.seq += 1
            feed.ahead.remove(feed.seq)
        if not feed.ahead:
            feed.asked_at = 0
            return None
        if feed.asked_at:
            return None
        self.gaps += 1
        return self._request(state.gateway, feed, now)

    def _request(self, name: str, feed: PeerFeed, now: int, again: bool = False) -> ResendRequest:
        feed.asked_at = now
        own = self._publisher.gateway
        if again or len(feed.ahead) > BUFFERED or not feed.seq:
            return ResendRequest(own, name)
        return ResendRequest(own, name, feed.seq + 1, max(feed.ahead) - 1)
