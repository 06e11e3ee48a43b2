"""Admission controller: queues requests, refuses them, and says which goes next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pigou.config import ControlConfig
from pigou.control.admission.admission_queue import (
    MIN_RETRY,
    AdmissionQueue,
    DrainRate,
    LongStreams,
    Refusal,
    TenantActivity,
    TenantQuota,
)
from pigou.control.admission.fair_order import TenantOrder
from pigou.control.admission.lanes import QueueLanes
from pigou.control.admission.queue_order import QueuedRequest, QueueLane, QueueOrder, load
from pigou.control.admission.usage_prices import fleet_rates
from pigou.control.admission.worker_capacity import (
    UNLIMITED,
    WorkerCapacity,
    has_capacity,
    max_per_request,
)
from pigou.control.latency_model.estimates import Estimates
from pigou.control.messages import Choice, Queue, Shed
from pigou.control.peers.allowance import StreamAllowance
from pigou.control.peers.bookings import ClassLoad, TenantService
from pigou.control.prefix_index import PrefixIndex
from pigou.control.request_tracker import RequestTracker
from pigou.control.routing.view import FleetView
from pigou.control.state import FleetState, StreamSlots, both
from pigou.request import NEVER, SECOND, Counts, Flags, Request, payer_of

#: A worker that failed a request is tried again for it after this time, if no other can serve.
EXCLUDED_FOR = SECOND
#: Nanoseconds between two updates of the prices that orders charge.
REPRICED_EVERY = SECOND // 4


class QueueEntry(NamedTuple):
    """Result of adding a request to the queue."""

    ahead: int  # requests before it
    refusal: Refusal | None  # None if the queue can keep it
    # why its deadline cannot be met; None where it can, or where the order does not ask.
    late: str | None


class AdmissionController:
    """Keeps admission queue, worker capacity and drain rate in step; chooses no workers.

    The control plane calls `arrive`, `enqueue`, `is_next` and `conclude`, then routes.

    Example:
        admission = AdmissionController(ControlConfig(admission={"order": "fair"}))
        assert not admission.queue
    """

    def __init__(self, config: ControlConfig) -> None:
        order = load(config.admission)
        self.activity = TenantActivity()
        quota = TenantQuota(self.activity, config.max_queued, config.max_queued_tokens)
        self.queue = AdmissionQueue(order, quota)
        self.capacity = WorkerCapacity(config, order.holds_back, order.reserve)
        self.drain_rate = DrainRate()
        self.lanes = QueueLanes(config.classes)
        self._weights = config.tenant_weights
        #: whether the order counts the tokens that each tenant is served
        self.counts_tokens = getattr(type(order), "served", None) is not QueueOrder.served
        self._timeout = config.queue_timeout
        self._max_per_request = config.max_request_inflight
        self.displaced: list[Shed] = []  # requests displaced since the last tick
        #: the order, where it shares between tenants without bands
        self.shared = order if isinstance(order, TenantOrder) else None
        #: the same order if it `follows` requests; if it is `priced`; if it `masks` workers
        self._follower = self.shared if self.shared is not None and self.shared.follows else None
        self._priced = self.shared if self.shared is not None and self.shared.priced else None
        self._long = LongStreams(order.params.overrun) if getattr(order, "holds", False) else None
        self._masker = self.shared if self.shared is not None and self.shared.masks else None
        self._priced_at = self._written = 0
        self.allowance = StreamAllowance()  # this gateway's share of streams

    def paid(self, request: Request) -> Request:
        """Return a request with its payer: accounts without a weight share that of `*`, if any."""
        account = payer_of(request.account, self._weights)
        if account == request.account:
            return request
        return msgspec.structs.replace(request, payer=account)

    def arrive(self, waiting: QueuedRequest, now: int) -> Shed | None:
        """Accept a request; return its refusal if its whole group does not fit."""
        request = waiting.request
        waiting.weight = self._weights.get(request.account, 1.0)
        waiting.accepted = request.is_follower
        waiting.lane = self.lanes.of(request)
        waiting.due_ms = self.lanes.class_of(request).ttft_ms
        self.activity.seen(request.account, waiting.weight, now)
        if request.group and not waiting.returned:
            refusal = self.queue.refusal(waiting) if request.held else None
            if refusal is not None and not self._displace(waiting, refusal, now):
                return self._shed(waiting, refusal, now)
            self.queue.quota.reserve(waiting)
        return None

    def skips_queue(self, waiting: QueuedRequest) -> bool:
        """True if no request waits before this one, which is not queued."""
        return not (self.queue or waiting.returned)

    def peer_service(self, change: TenantService, active: bool, now: int) -> None:
        """Add another gateway's change of service for a tenant."""
        tenant = change.tenant
        weight = self._weights.get(tenant, 1.0)
        self.activity.peer_streams(tenant, change.streams)
        if active:
            self.activity.seen(tenant, weight, now)
        if self.shared is not None:
            self.shared.peer_service(change, weight)

    def update_allowance(
        self, state: FleetState, others: Sequence[TenantService], now: int
    ) -> None:
        """Update this gateway's share of streams if due."""
        if not self.allowance.due(now):
            return
        streams = self.capacity.max_streams(state, UNLIMITED)[state.columns.decodes]
        places = float(streams.astype(np.float64).sum())
        if self.shared is None:
            self.allowance.update(now, places, self.services(), others)
            return
        charges = self.shared.token_charges
        self.allowance.update(now, places, self.services(), others, self._weights, charges)

    def services(self) -> list[TenantService]:
        """Return this gateway's service for each tenant."""
        quota, own = self.queue.quota, self.activity.own_streams()
        served = {} if self.shared is None else self.shared.service
        follower = self._follower
        services = []
        for tenant in {**served, **own, **dict.fromkeys(quota.tenants)}:
            prompt_tokens, output_tokens = served.get(tenant, (0, 0))
            requests, _ = quota.queued(tenant)
            held_ms = 0 if follower is None else follower.kv_token_ms(tenant)
            streams = own.get(tenant, 0)
            services.append(
                TenantService(tenant, prompt_tokens, output_tokens, streams, requests, held_ms)
            )
        return services

    def class_loads(self) -> tuple[ClassLoad, ...]:
        """Return this gateway's requests of each class with a cap."""
        return self.lanes.loads(self.queue.lanes)

    def reprice(self, tracker: RequestTracker, index: PrefixIndex, now: int) -> None:
        """Tell the order the fleet's rates and prices, if it uses them and they are due."""
        order, passed = self._priced, now - self._priced_at
        if order is None or passed < REPRICED_EVERY or not tracker.state.workers:
            return
        tokens = sum(prompts + outputs for prompts, outputs in order.service.values())
        written_s = max(0, tokens - self._written) * SECOND / passed
        self._priced_at, self._written = now, tokens
        state = tracker.state
        order.reprice(
            fleet_rates(
                state, tracker.latency_model.peek(now), self.capacity.max_streams(state, UNLIMITED),
                index.recomputed_share(state.ids), written_s,
            )
        )  # fmt: skip

    def enqueue(self, waiting: QueuedRequest, now: int, min_ttft_s: float) -> QueueEntry:
        """Queue a request, which may be next; `conclude` says whether it stays."""
        late = self._late(waiting, now, min_ttft_s)
        # As it were before this one; a group was asked for as a whole.
        refusal = None if waiting.request.held else self.queue.refusal(waiting)
        if refusal is not None and late is None and self._displace(waiting, refusal, now):
            refusal = None
        return QueueEntry(self.queue.add(waiting), refusal, late)

    def blocked(self, waiting: QueuedRequest, state: FleetState) -> set[QueueLane] | None:
        """Return the lanes that cannot go now, as this request could not; None for all.

        Long prompts and short requests leave each other what they are owed.
        """
        lanes, workers = self.full(state), int(np.count_nonzero(state.columns.decodes))
        if not waiting.returned and self.lanes.at_cap(waiting, workers, self.queue.lanes):
            return lanes | {waiting.lane}
        if self.lanes.long_lane is None:
            return None
        return lanes | self._lanes(is_long=waiting.lane.is_long)

    def _lanes(self, *, is_long: bool) -> set[QueueLane]:
        """Return the lanes of waiting long prompts, or of the others."""
        return {lane for lane in self.queue.lanes if lane.is_long == is_long}

    def full(self, state: FleetState) -> set[QueueLane]:
        """Return the lanes whose classes have all their streams."""
        if not self.lanes.some or not self.queue.lanes:
            return set()
        return self.lanes.full(self.queue.lanes, int(np.count_nonzero(state.columns.decodes)))

    def is_next(self, waiting: QueuedRequest, now: int, state: FleetState) -> bool:
        """True if a queued request goes next in its lane."""
        up, blocked = state.row, self.full(state)
        if self.lanes.long_lane is not None:
            blocked |= self._lanes(is_long=not waiting.lane.is_long)
        skip = [
            limits
            for limits in self.queue.limits()
            if limits != waiting.limits and (limits[1] or not limits[0].isdisjoint(up))
        ]
        return self.queue.next(now, skip, blocked) is waiting

    def conclude(self, waiting: QueuedRequest, entry: QueueEntry, now: int) -> Queue | Shed:
        """Keep a request in the queue, or shed it."""
        request = waiting.request
        if entry.refusal is None and entry.late is None:
            return Queue(request.id, entry.ahead)
        self.queue.remove(request.id)
        if entry.late is not None:
            self.queue.quota.release(request.group)
            return Shed(request.id, entry.late, MIN_RETRY)
        assert entry.refusal is not None
        return self._shed(waiting, entry.refusal, now)

    def _shed(self, waiting: QueuedRequest, refusal: Refusal, now: int) -> Shed:
        retry = self._retry(waiting, refusal.tenant, now)
        return Shed(waiting.request.id, refusal.reason, retry, refusal.tenant)

    def _displace(self, waiting: QueuedRequest, refusal: Refusal, now: int) -> bool:
        """Shed less urgent requests for an urgent newcomer; return if it can wait."""
        displaced = self.queue.displace(waiting)
        reason = "a more urgent request took its place in the full queue"
        for queued in displaced:
            self.displaced.append(self._shed(queued, Refusal(reason, refusal.tenant), now))
        return bool(displaced)

    def may_add(self, own: int, tokens: int, state: FleetState, known: Estimates) -> bool:
        """True if a client's request with `own` sequences in flight may submit another."""
        if own >= max_per_request(state, known, self.capacity, self._max_per_request):
            return False
        if len(self.queue):
            return self.queue.order.holds_back  # the order decides which of them goes first
        return has_capacity(tokens, state, known, self.capacity)

    def overdue(self, now: int, up: bool = True) -> list[Shed]:
        """Remove requests that waited too long; accepted ones stay while a worker is `up`."""
        shed = []
        for waiting in self.queue.overdue(now - self._timeout, up):
            retry = self._retry(waiting, False, now)
            shed.append(Shed(waiting.request.id, "it waited too long for a worker", retry))
        self.queue.forgive(now - EXCLUDED_FOR)
        return shed

    def give_up(self, request: Request, worker: str, now: int) -> Shed:
        """Return the refusal of a request that waited too long inside a worker."""
        waited_s = (now - request.arrival) / SECOND
        reason = (
            f"it waited {waited_s:.0f} s, the last of them inside {worker}, without being begun"
        )
        retry = self.drain_rate.retry_after(len(self.queue) + 1, self.queue.quota.tokens, now)
        return Shed(request.id, reason, retry)

    def above(self, waiting: QueuedRequest) -> bool:
        """True if the tenant exceeds its share of the fleet, bursts apart."""
        if self.queue.order.underserved(waiting):
            return False
        return self.activity.above(waiting.request.account, waiting.weight)

    def priority(self, waiting: QueuedRequest, above: bool) -> int | None:
        """Return the priority sent to workers, None for the client's own.

        Tenants with several waiting requests count as `above` their share if others share the
        fleet. Further sequences of a request, and classes of the lane `background`, yield.
        """
        tenant, weight, order = waiting.request.account, waiting.weight, self.queue.order
        if not above and self.queue.quota.queued(tenant)[0] > 1:
            above = not order.underserved(waiting) and self.activity.part(tenant, weight) < 1.0
        priority = order.priority(waiting, above)
        yields = waiting.request.is_follower
        yields |= self.lanes.class_of(waiting.request).lane == "background"
        background = yields and not waiting.request.priority
        return int(background) if priority is None and background else priority

    def allowed(self, request: Request, state: FleetState, room: Flags, open_: Flags) -> Flags:
        """Return the workers with room that the order lets a request use, (workers,)."""
        if self._masker is None:
            return room
        return self._masker.allowed(request, state.ids, both(room, open_))

    def is_held(self, waiting: QueuedRequest, state: FleetState, now: int) -> bool:
        """True if its tenant gets no further stream now."""
        self.update_held(state, now)
        return waiting.request.account in self.queue.order.held

    def update_held(self, state: FleetState, now: int) -> None:
        """Tell the order which tenants to pass over."""
        order = self.queue.order
        if self._long is not None and (self._long or order.held):
            streams = self.capacity.max_streams(state, UNLIMITED)[state.columns.decodes]
            places = float(streams.sum())
            order.held = self._long.held(self.activity, places, self._weights, now)

    def began(
        self, waiting: QueuedRequest, choice: Choice, row: int, fleet: FleetView, now: int
    ) -> None:
        """Record a routed request; `fleet` is the view it was routed by."""
        request = waiting.request
        if self.lanes.some:
            self.lanes.began(waiting, choice.decode, now)
        self.capacity.take(request, choice, row, fleet, now)
        self.activity.began(request.account, request.sequences)
        self.allowance.began()
        if self._follower is not None:
            self._follower.began(request, choice.decode, now)

    def failed(self, request: Request, now: int) -> None:
        """Record that a routed request lost its worker."""
        self.capacity.free(request.id)
        self._left(request, now)

    def ended(self, request: Request, now: int) -> None:
        """Record that a routed request left the fleet."""
        self.drain_rate.ended(now, self.capacity.free(request.id))
        self._left(request, now)
        self.activity.seen(request.account, self._weights.get(request.account, 1.0), now)

    def _left(self, request: Request, now: int) -> None:
        self.lanes.ended(request.id)
        self.activity.ended(request.account, request.sequences)
        if self._long is not None:
            self._long.ended(request)
        if self._follower is not None:
            self._follower.ended(request, now)

    def on_tokens(self, streams: StreamSlots, slots: Counts, counts: Counts) -> None:
        """Count output tokens, if the order `counts_tokens`."""
        served = self.queue.order.served
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            routed = streams.requests[slot]
            assert routed is not None, "tokens of a slot that no request has"
            served(routed.request, count)
            if self._long is not None:
                self._long.grew(routed.request, count)

    def _late(self, waiting: QueuedRequest, now: int, min_ttft_s: float) -> str | None:
        deadline = waiting.request.deadline
        accepted = waiting.returned or waiting.accepted
        if not self.queue.order.refuses_late or accepted or deadline == NEVER:
            return None
        if now + min_ttft_s * SECOND <= deadline:
            return None
        late = (now - deadline) / SECOND + min_ttft_s
        return f"its first token would come at least {late:.3f} s after its deadline"

    def _retry(self, waiting: QueuedRequest, tenant: bool, now: int) -> int:
        quota = self.queue.quota
        part = 1.0
        requests, tokens = len(self.queue), quota.tokens
        if tenant:
            requests, tokens = quota.queued(waiting.request.account)
            part = self.activity.part(waiting.request.account, waiting.weight)
        return self.drain_rate.retry_after(requests + 1, tokens + waiting.tokens, now, part)
