"""The publisher: tells other gateways what changed here, and again what they missed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from pigou.control.peers.bookings import (
    BOOKED,
    EXPECTED,
    SENT,
    Counts,
    PredictedPrompt,
    TenantService,
    WorkerBookings,
)
from pigou.control.peers.sync_messages import PeerState, ResendRequest
from pigou.control.plane import ControlPlane
from pigou.request import SECOND

#: Messages that can be asked for again; beyond them comes a snapshot.
BUFFERED = 256
#: Predicted prompts of a snapshot.
_PROMPTS = 256
#: A message goes out at least so often: silence means that a gateway is gone.
HEARTBEAT_NS = SECOND


class PeerPublisher:
    """Numbers the changes of one ControlPlane's own state.

    What it publishes are absolute numbers of what changed, so that any later message puts right
    what an earlier one, now lost, had said of the same worker or tenant.

    Attributes:
        gateway: name, which must be another one after each start.
        began_at: when the first went out, in nanoseconds; 0 before.
    """

    def __init__(self, gateway: str, plane: ControlPlane) -> None:
        self.gateway, self.seq, self.began_at = gateway, 0, 0
        self._plane = plane
        self._ids: tuple[str, ...] = ()
        self._matrix: Counts = np.zeros((len(BOOKED), 0), dtype=np.int64)
        self._workers: dict[str, WorkerBookings] = {}
        self._tenants: dict[str, TenantService] = {}
        self._prompts: deque[PredictedPrompt] = deque(maxlen=_PROMPTS)
        self._sent: deque[tuple[PeerState, int]] = deque(maxlen=BUFFERED)

    def changes(
        self, now: int, heard: Mapping[str, tuple[int, int]], name: Callable[[str], str] = str
    ) -> PeerState | None:
        """Return what changed since the last call; None for nothing, until a heartbeat is due.

        Args:
            now: nanoseconds.
            heard: as of `PeerState`.
            name: of a worker among gateways, by its id here; "" for one that is not shared.
        """
        workers = self._changed_workers(name)
        services = self._plane.admission.services()
        tenants = tuple(s for s in services if self._tenants.get(s.tenant) != s)
        tenants += self._idle_tenants({service.tenant for service in services})
        predicted = self._plane.predicted
        prompts = tuple(PredictedPrompt(name(p.worker), p.keys) for p in predicted)
        prompts = tuple(prompt for prompt in prompts if prompt.worker)
        predicted.clear()
        due = not self._sent or now - self._sent[-1][1] >= HEARTBEAT_NS
        if not (workers or tenants or prompts or due):
            return None
        self.seq += 1
        self.began_at = self.began_at or now
        self._workers.update((bookings.worker, bookings) for bookings in workers)
        self._tenants.update((service.tenant, service) for service in tenants)
        self._prompts += prompts
        state = PeerState(self.gateway, self.seq, workers, tenants, prompts, dict(heard))
        self._sent.append((state, now))
        return state

    def answer(self, request: ResendRequest) -> list[PeerState]:
        """Return the messages that another gateway missed, or a snapshot where they are gone."""
        first = self._sent[0][0].seq if self._sent else 1
        if 0 < first <= request.first <= request.last <= self.seq:
            return [s for s, _ in self._sent if request.first <= s.seq <= request.last]
        workers = tuple(b for b in self._workers.values() if any(b.counts))
        tenants, prompts = tuple(self._tenants.values()), tuple(self._prompts)
        return [PeerState(self.gateway, self.seq, workers, tenants, prompts, snapshot=True)]

    def farewell(self) -> PeerState:
        """Return the last message: nothing of this gateway weighs on the workers any more."""
        self.seq += 1
        return PeerState(self.gateway, self.seq, leaves=True)

    def age_ns(self, seq: int, now: int) -> int | None:
        """Return the nanoseconds since a message went out; None where that is not known."""
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
        """Return the tenants that had something, and are not `known` here any more."""
        gone = [service for name, service in self._tenants.items() if name not in known]
        for service in gone:
            del self._tenants[service.tenant]
        return tuple(
            TenantService(service.tenant, service.prompt_tokens, service.output_tokens)
            for service in gone
            if service.streams or service.waiting
        )


def own_bookings(plane: ControlPlane) -> Counts:
    """Return what this gateway alone has on each worker, (numbers of `BOOKED`, workers)."""
    state, matrix = plane.state, plane.state.peers.own(plane.state.columns)
    matrix[EXPECTED] = plane.admission.capacity.expected_tokens(state.ids)
    sent = plane.tracker.sent_prompts
    matrix[SENT] = [sent.get(worker, 0) for worker in state.ids]
    return matrix
