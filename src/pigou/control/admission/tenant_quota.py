"""Tenant quota: the limit of the admission queue, and each tenant's part of it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pigou.control.admission.queue_order import QueuedRequest
from pigou.request import SECOND

#: The whole queue may be this many times its limit, so that the tenants' parts stay open.
_OVERFLOW = 2


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a newcomer may not wait; `tenant`: its tenant's own share is full, not the fleet."""

    reason: str
    tenant: bool


@dataclass(slots=True)
class _TenantCounts:
    requests: int = 0
    tokens: int = 0


class TenantQuota:
    """Which requests may begin to wait.

    While requests (and tokens) are below their limit, every tenant may. Above it, a tenant may
    while it has less than its part queued: limit * its weight / weights of all active tenants
    (`TenantActivity`). So a flood of one tenant fills the limit, and the others still find their
    parts. The whole queue stays below twice the limit, but for one request of each tenant that
    has none queued. With `max_requests` 0 none may wait; `max_tokens` 0 is no limit.
    """

    def __init__(self, activity: TenantActivity, max_requests: int, max_tokens: int = 0) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0
        self._activity = activity
        self._queued: dict[str, _TenantCounts] = {}
        self._groups: dict[str, tuple[str, int, int]] = {}

    def queued(self, tenant: str) -> tuple[int, int]:
        """Return requests and tokens that a tenant has waiting."""
        queued = self._queued.get(tenant)
        return (0, 0) if queued is None else (queued.requests, queued.tokens)

    @property
    def tenants(self) -> Iterable[str]:
        """Tenants that have requests waiting."""
        return self._queued.keys()

    def add(self, waiting: QueuedRequest) -> None:
        """Count a request that waits."""
        self._count(waiting.request.tenant, waiting.request.sequences, waiting.tokens)

    def remove(self, waiting: QueuedRequest) -> None:
        """Count out a request that waited."""
        self._count(waiting.request.tenant, -waiting.request.sequences, -waiting.tokens)

    def reserve(self, waiting: QueuedRequest) -> None:
        """Count the sequences of a group that follow this one, in place of those before."""
        request = waiting.request
        self.release(request.group)
        if request.held > 0:
            self._groups[request.group] = request.tenant, request.held, waiting.held_tokens
            self._count(request.tenant, request.held, waiting.held_tokens)

    def release(self, group: str) -> None:
        """Count out what follows of a group; an unknown one is no error."""
        tenant, sequences, tokens = self._groups.pop(group, ("", 0, 0))
        if sequences:
            self._count(tenant, -sequences, -tokens)

    @property
    def reserved(self) -> int:
        """Sequences of groups that were not submitted yet."""
        return sum(sequences for _, sequences, _ in self._groups.values())

    def _count(self, tenant: str, requests: int, tokens: int) -> None:
        queued = self._queued.setdefault(tenant, _TenantCounts())
        queued.requests += requests
        queued.tokens += tokens
        self.requests += requests
        self.tokens += tokens
        if queued.requests == 0:
            del self._queued[tenant]

    def refusal(
        self, waiting: QueuedRequest, without: Sequence[QueuedRequest] = ()
    ) -> Refusal | None:
        """Return why a newcomer may not wait; None when it may, were those `without` gone."""
        tenant = waiting.request.tenant
        requests, tokens = self.queued(tenant)
        own = [queued for queued in without if queued.request.tenant == tenant]
        requests -= sum(queued.request.sequences for queued in own)
        tokens -= sum(queued.tokens for queued in own)
        part = self._activity.part(tenant, waiting.weight)
        asks = waiting.request.sequences + waiting.request.held
        total = self.requests - sum(queued.request.sequences for queued in without)
        refusal = _refusal("requests", self.max_requests, total, requests, asks, part)
        if refusal is None and self.max_tokens:
            asks = waiting.tokens + waiting.held_tokens
            total = self.tokens - sum(queued.tokens for queued in without)
            refusal = _refusal("tokens", self.max_tokens, total, tokens, asks, part)
        return refusal


def _refusal(what: str, limit: int, total: int, own: int, asks: int, part: float) -> Refusal | None:
    if total + asks <= limit or (limit > 0 and total == 0):
        return None
    share = limit * part
    within = own + asks <= share or (limit > 0 and own == 0 and part < 1.0)
    if within and (total + asks <= _OVERFLOW * limit or own == 0):
        return None
    several = f"; n and prompt ask for {asks} more: send fewer at once" if asks > 1 else ""
    several = several if what == "requests" else ""
    if part < 1.0 and not within:
        text = f"the tenant's share of the queue is full: {own} of {share:.0f} {what}"
        return Refusal(text + several, tenant=True)
    return Refusal(f"the queue is full: {total} of {limit} {what}{several}", tenant=False)


#: A tenant is active until this time after its last request came or ended, in nanoseconds.
LINGERS = 10 * SECOND


class TenantActivity:
    """The tenants that share the fleet now, and what each has of it."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._weights = 0.0
        self._streams: Counter[str] = Counter()
        self._peer_streams: Counter[str] = Counter()  # of those, at other gateways
        self._total = self._peer_total = 0

    def seen(self, tenant: str, weight: float, now: int) -> None:
        """Record that a request of a tenant came, or ended."""
        if len(self._seen) == 1 and tenant in self._seen:  # no other tenant shares the fleet
            self._seen[tenant], self._weights = (now, weight), weight
            return
        _, before = self._seen.pop(tenant, (0, 0.0))
        self._seen[tenant] = (now, weight)
        self._weights += weight - before
        while self._seen:
            oldest, (when, gone) = next(iter(self._seen.items()))
            if now - when <= LINGERS:
                break
            del self._seen[oldest]
            self._weights -= gone
        if len(self._seen) == 1:
            self._weights = weight  # no rounding stays behind

    def part(self, tenant: str, weight: float) -> float:
        """Return a tenant's weight over that of all that share the fleet, itself among them."""
        _, before = self._seen.get(tenant, (0, 0.0))
        return weight / max(weight, self._weights - before + weight)

    def began(self, tenant: str, sequences: int = 1) -> None:
        """Record that a request of a tenant was sent to a worker."""
        self._streams[tenant] += sequences
        self._total += sequences

    def ended(self, tenant: str, sequences: int = 1) -> None:
        """Record that a request of a tenant left its worker."""
        self._total -= sequences
        self._streams[tenant] -= sequences
        if not self._streams[tenant]:
            del self._streams[tenant]

    def peer_streams(self, tenant: str, change: int) -> None:
        """Record by how many streams of a tenant other gateways changed."""
        if change:
            self._total += change
            self._peer_total += change
            for streams in (self._streams, self._peer_streams):
                streams[tenant] += change
                if not streams[tenant]:
                    del streams[tenant]

    def own_streams(self) -> dict[str, int]:
        """Return the streams of each tenant that this gateway has."""
        peers = self._peer_streams
        own = {tenant: streams - peers[tenant] for tenant, streams in self._streams.items()}
        return {tenant: streams for tenant, streams in own.items() if streams}

    @property
    def own_total(self) -> int:
        """Streams of all tenants that this gateway has."""
        return self._total - self._peer_total

    def above(self, tenant: str, weight: float) -> bool:
        """True if a tenant has more than its part of what is in flight, and others share it."""
        part = self.part(tenant, weight)
        return part < 1.0 and self._streams[tenant] > part * self._total
